"""The paper's theory as functions: the tangent kernel of a mixer, the geometry of its read, what a read can select, and
the costs of the ways to read. `femixer theory` prints the tables of docs/theory.md and draws its figures.

tangent     the neural tangent kernel, by group of parameters and by path, and derivatives of the read in the prior
capacity    patterns, hulls, ranks, finitely many features
nodes       general map, additive map, attention, FEM, fixed state: operations and bytes
"""

from femixer.theory.capacity import (
    exponential_tail,
    hull_gap,
    linearized_head,
    minimal_degree,
    mixed_difference,
    monomial_features,
    most_patterns,
    patterns,
    per_dimension_cost,
    value_ranks,
)
from femixer.theory.tangent import (
    MixerRead,
    beta_kernel,
    gate_kernel,
    group_of,
    jacobians,
    log_weight_hessian,
    logit_gradient,
    output_kernel,
    prior_kernel,
    read_of,
    tangent_kernels,
    temperature_kernel,
    through,
    value_kernel,
    value_paths,
)

__all__ = [
    "MixerRead",
    "beta_kernel",
    "exponential_tail",
    "gate_kernel",
    "group_of",
    "hull_gap",
    "jacobians",
    "linearized_head",
    "log_weight_hessian",
    "logit_gradient",
    "minimal_degree",
    "mixed_difference",
    "monomial_features",
    "most_patterns",
    "output_kernel",
    "patterns",
    "per_dimension_cost",
    "prior_kernel",
    "read_of",
    "tangent_kernels",
    "temperature_kernel",
    "through",
    "value_kernel",
    "value_paths",
    "value_ranks",
]
