"""The optimizer of all experiments."""

from torch import nn
from torch.optim import AdamW

from femixer.options import check


def adamw(
    model: nn.Module,
    learning_rate: float,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    fused: bool | None = None,
) -> AdamW:
    """AdamW that decays weight matrices only, embeddings among them.

    Biases, norms and bare parameters are left alone. That includes the inverse temperature: its parameter x in
    beta_max = softplus(x + 1.8) must grow to 10 and beyond where a channel wants its maximum, and there a decay of 0.01
    would pull back a tenth of a full step. Embeddings decay because a table that is tied to the output matrix is that
    matrix: tied or not, the same rule holds for both. fused: one call for all parameters, which models so small that
    calls cost more than numbers should have (2.7 against 0.6 ms for 30 matrices of 64 x 64); None is torch's choice.
    """
    check(learning_rate > 0, "learning_rate", learning_rate, "a number above 0")
    check(weight_decay >= 0, "weight_decay", weight_decay, "a number of at least 0")
    check(all(0 <= beta < 1 for beta in betas), "betas", betas, "two numbers from 0 to below 1")
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = {name for name, p in parameters.items() if name.split(".")[-1] == "weight" and p.ndim > 1}
    groups = [
        {"params": [p for name, p in parameters.items() if name in matrices], "weight_decay": weight_decay},
        {"params": [p for name, p in parameters.items() if name not in matrices], "weight_decay": 0.0},
    ]
    return AdamW([group for group in groups if group["params"]], lr=learning_rate, betas=betas, fused=fused)
