"use strict";

/* What a mixer read, decoded from the bytes of page.py, and the posteriors computed from it. */

const ARRAYS = { uint8: Uint8Array, uint16: Uint16Array, float32: Float32Array };

class Reading {
  constructor(about, base64) {
    this.about = about;
    const buffer = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0)).buffer;
    this.arrays = {};
    for (const [name, { type, offset, bytes }] of Object.entries(about.arrays))
      this.arrays[name] = new ARRAYS[type](buffer.slice(offset, offset + bytes));
  }

  /* A quantity (value, lam, gate, hidden_beta, kl) of one head, token and channel. */
  at(name, head, token, channel) {
    const { tokens, width } = this.about, column = head * width + channel;
    const code = this.arrays[name][(head * tokens + token) * width + channel];
    return this.arrays[name + "_low"][column] + this.arrays[name + "_step"][column] * code;
  }

  betaMax(head, channel) {
    return this.arrays.beta_max[head * this.about.width + channel];
  }

  /* Where the weights of a channel are stored, -1 where they are not. */
  slot(head, channel) {
    return this.about.channels ? this.about.channels[head].indexOf(channel) : 0;
  }

  /* Whether weights of this kind can be shown for the channel. */
  has(kind, head, channel) {
    return this.slot(head, channel) >= 0 && !(kind === "hidden" && this.about.pairs);
  }

  /* Logarithms of the stored weights ("prior" or "posterior") of a query over all keys. */
  logs(stored, head, channel, query) {
    const { tokens, causal, channels } = this.about, { floor, step } = this.about.weights[stored];
    const cells = causal ? (tokens * (tokens + 1)) / 2 : tokens * tokens;
    const count = channels ? channels[head].length : 1;
    let at = (head * count + this.slot(head, channel)) * cells;
    at += causal ? (query * (query + 1)) / 2 : query * tokens;
    const result = new Float64Array(tokens).fill(-Infinity);
    for (let key = 0; key < (causal ? query + 1 : tokens); key++) {
      const code = this.arrays[stored][at + key];
      if (code > 0) result[key] = floor + (code - 1) * step;
    }
    return result;
  }

  /* Weights of a query over the keys. kind: "prior"; "hidden" and "max", the posterior at the hidden temperature and at
     beta_max; "effective", (1 - lam) prior + lam posterior at beta_max, the slope of the read in the values. */
  weights(kind, head, channel, query) {
    if (!this.has(kind, head, channel)) return null;
    if (kind === "prior") return normalized(this.logs("prior", head, channel, query));
    if (kind === "effective") {
      const lam = this.at("lam", head, query, channel), q = this.weights("max", head, channel, query);
      return this.weights("prior", head, channel, query).map((p, key) => (1 - lam) * p + lam * q[key]);
    }
    if (this.about.pairs) return normalized(this.logs("posterior", head, channel, query));
    const beta = kind === "max" ? this.betaMax(head, channel) : this.at("hidden_beta", head, query, channel);
    const logs = this.logs("prior", head, channel, query);
    return normalized(logs.map((log, key) => log + beta * this.at("value", head, key, channel)));
  }
}

/* exp(logs) divided by its sum; zeros where there is no weight at all. */
function normalized(logs) {
  const top = logs.reduce((a, b) => Math.max(a, b), -Infinity);
  if (top === -Infinity) return logs.fill(0);
  const weights = logs.map((log) => Math.exp(log - top));
  const total = weights.reduce((a, b) => a + b, 0);
  return weights.map((w) => w / total);
}
