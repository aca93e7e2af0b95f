"""Initial values: standardised data, inducing inputs by k-means, layers that start as the identity, weights; the start
of a deeper program at the fit of a shallower one."""

from numpyro_dgp._repr import public_dir
from numpyro_dgp.depth.deepen import DeeperStart, deepen
from numpyro_dgp.functions.layer_starts import LayerStart, Standardizer, inducing_patches, kmeans, layers, mixing

__all__ = [
    "DeeperStart",
    "LayerStart",
    "Standardizer",
    "deepen",
    "inducing_patches",
    "kmeans",
    "layers",
    "mixing",
]
__dir__ = public_dir(globals())
