"""Initial values: standardised data, inducing inputs by k-means, layers that start as the identity, weights; the start
of a deeper program at the fit of a shallower one."""

from numpyro_dgp._shown import public_dir
from numpyro_dgp.deepening.deepen import DeeperStart, deepen
from numpyro_dgp.layer_starts import LayerStart, Standardizer, inducing_patches, kmeans, layers, mixing
from numpyro_dgp.representations.dense_start import from_dense

__all__ = [
    "DeeperStart",
    "LayerStart",
    "Standardizer",
    "deepen",
    "from_dense",
    "inducing_patches",
    "kmeans",
    "layers",
    "mixing",
]
__dir__ = public_dir(globals())
