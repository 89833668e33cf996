"""The counterpart of ``deepspeed.elasticity``: batch sizes that serve many world sizes.

::

    from dsl.elasticity import compute_elastic_config

    batch, world_sizes = compute_elastic_config(config, "0.19.7")
    batch, world_sizes, micro_batch = compute_elastic_config(config, "0.19.7", world_size=16)
"""

from __future__ import annotations

from dsl.elasticity.compute import (
    compute_elastic_config,
    elasticity_enabled,
    ensure_immutable_elastic_config,
)
from dsl.elasticity.solver import ELASTICITY, ENABLED, ENABLED_DEFAULT, ElasticityConfig
from dsl.errors import ElasticityConfigError, ElasticityError, ElasticityIncompatibleWorldSize

__all__ = [
    "ELASTICITY",
    "ENABLED",
    "ENABLED_DEFAULT",
    "ElasticityConfig",
    "ElasticityConfigError",
    "ElasticityError",
    "ElasticityIncompatibleWorldSize",
    "compute_elastic_config",
    "elasticity_enabled",
    "ensure_immutable_elastic_config",
]
