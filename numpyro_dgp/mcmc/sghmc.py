r"""Stochastic-gradient Hamiltonian Monte Carlo over the sites of a program that takes minibatches.

The potential is the negative log joint density of the program, in unconstrained space, with the scale of its plates.
Every step has new rows of the data and new values of the hidden layers, drawn from :math:`p(h \mid v)`. The gradient
is then unbiased for that of

.. math:: \log p(\varphi) + \log p(v) + \sum_n E_{p(h_n \mid v)} [\log p(y_n \mid h_n, v)],

which is, at a single v, the bound that guides such as ``InducingPoint`` maximise. Its exponential, normalised, is the
optimal q(v) of that bound; the chain samples it without assuming a family.

**Langevin dynamics with noisy gradients**, and the adaptation of mass and noise.

**Moving-window Monte Carlo EM** for the ``numpyro.param`` sites :math:`\theta`. By Fisher's identity

.. math:: \nabla_\theta \log p(y \mid \theta) = E_{p(v \mid y, \theta)} [\nabla_\theta \log p(y, v \mid \theta)],

with the density of the chain for p. An optimiser follows the gradient at one of the last positions of the chain.

Coordinates :math:`\varphi` have a potential V, a mass (diagonal) and a velocity :math:`\dot\varphi`, the distance of
one step, which is :math:`N(0, \kappa)` in equilibrium, with :math:`\kappa` the squared step size divided by the mass.
All functions act on each coordinate separately.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.distributions import biject_to, constraints
from numpyro.infer.initialization import init_to_uniform
from numpyro.infer.util import initialize_model, potential_energy, transform_fn
from numpyro.primitives import Messenger
from numpyro.util import is_prng_key

from numpyro_dgp._checks import expect, expect_kind, expected, is_concrete, require_count, require_params
from numpyro_dgp._data import indexable
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.analysis.checks import ALL_ROWS, FIXED_PARAMETERS, OUTSIDE_TRANSFORMATIONS, require
from numpyro_dgp.analysis.observations_apart import require_observations_apart
from numpyro_dgp.analysis.sites import Message, Trace, hide, site_kind
from numpyro_dgp.mcmc.program_kernel import ProgramKernel, first_position, for_chains, split_keys

__all__ = ["Adaptation", "Learning", "SGHMC", "SGHMCState", "adapt", "heat", "step"]


class Adaptation(NamedTuple):
    """Running means of the gradient of each coordinate, over a window that is long where noise dominates."""

    window: Array
    """Length of the window, in steps."""
    mean: Array
    """Mean of gradients."""
    square: Array
    """Mean of squared gradients."""
    noise: Array
    """Variance of a gradient at one place, over minibatches and hidden draws."""

    @classmethod
    def start(cls, like: Array) -> Adaptation:
        """Before the first gradient: the squared gradient of a standard normal, no noise."""
        return cls(jnp.ones_like(like), jnp.zeros_like(like), jnp.ones_like(like), jnp.zeros_like(like))

    @property
    def mass(self) -> Array:
        """Root mean square of the gradient: a step then has size step_size ** 2 for any number of data."""
        return jnp.sqrt(self.square)


def adapt(state: Adaptation, first: Array, second: Array) -> Adaptation:
    r"""Update the running means by two independent gradients at the same place.

    The new value has the weight 1 / (window + 1) in each of them: it is the first gradient in the mean, its square in
    the mean square, and half the squared difference of the two gradients in the noise. The window becomes

    .. math:: 1 + \mathrm{window}\, (1 - \mathrm{mean}^2 / \mathrm{square}) ,

    with the numbers from before this update.

    Args:
        state: the window and the running means, one of each per coordinate.
        first: a gradient.
        second: a gradient from another minibatch.

    Example:
        >>> import jax.numpy as jnp
        >>> state = adapt(Adaptation.start(jnp.zeros(1)), jnp.array([3.0]), jnp.array([1.0]))
        >>> print(state.square, state.noise)
        [5.] [1.]

    Source: Springenberg et al. (2016), section 3.2, who take all of the mean square for noise; here the
    noise is estimated alone.
    """
    weight = 1 / (state.window + 1)

    def towards(old: Array, new: Array) -> Array:
        return old + weight * (new - old)

    return Adaptation(
        # longer where noise, not the mean, makes the square
        1 + state.window * (1 - jnp.square(state.mean) / state.square),
        towards(state.mean, first),
        towards(state.square, jnp.square(first)),
        towards(state.noise, 0.5 * jnp.square(first - second)),  # E (g - g')^2 / 2 = Var g
    )


def heat(mass: ArrayLike, noise: ArrayLike, step_size: float, friction: float) -> Array:
    r"""Bound on the excess temperature that noise in the gradient brings, in any direction.

    .. math:: \mathrm{heat} = \frac{2 - \alpha}{4 \alpha} \sum_i \kappa_i\, \mathrm{noise}_i ,

    a sum, because noise that is correlated between coordinates may all lie in one direction.

    Args:
        mass: of every coordinate.
        noise: variance of the gradient, by coordinate.
        step_size: a number.
        friction: :math:`\alpha`.

    Example:
        >>> import jax.numpy as jnp
        >>> print(heat(jnp.ones(1), jnp.array([100.0]), 0.01, 0.05).round(4))
        0.0975
    """
    return step_size**2 * (2 - friction) / (4 * friction) * jnp.sum(noise / mass)  # kappa = step_size^2 / mass


def step(
    key: Array,
    position: Array,
    velocity: Array,
    gradient: Array,
    mass: ArrayLike,
    step_size: float,
    friction: float,
) -> tuple[Array, Array]:
    r"""One step at temperature one: kick, half a drift, friction and noise, half a drift.

    .. math:: \dot\varphi \leftarrow \dot\varphi - \kappa\, \nabla V(\varphi), \quad
              \varphi \leftarrow \varphi + \tfrac12 \dot\varphi, \quad
              \dot\varphi \leftarrow (1 - \alpha)\, \dot\varphi + \sqrt{(1 - (1 - \alpha)^2)\, \kappa}\; \epsilon, \quad
              \varphi \leftarrow \varphi + \tfrac12 \dot\varphi .

    On a Gaussian of variance :math:`\sigma^2 > \kappa / 4`, with noise in the gradient, the stationary variance is

    .. math:: \sigma^2 \Bigl(1 + \frac{\mathrm{heat}}{1 - \kappa / 4 \sigma^2}\Bigr), \qquad
              \mathrm{heat} = \frac{2 - \alpha}{4 \alpha}\, \kappa\, \mathrm{noise} :

    exact for exact gradients, and too wide by the heat, of the order of the squared step size, for noisy ones.
    Symplectic Euler, the usual form, is off by :math:`\kappa / 4 \sigma^2`, of that order too, even for exact
    gradients.

    Args:
        key: PRNG key.
        position: :math:`\varphi`.
        velocity: :math:`\dot\varphi`, of the same shape.
        gradient: an unbiased estimate of :math:`\nabla V(\varphi)`.
        mass: of every coordinate, or one for all.
        step_size: a number.
        friction: :math:`\alpha` in (0, 1], part of the velocity that is lost in a step.

    Returns:
        Position and velocity.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> zero = jnp.zeros(1)
        >>> position, velocity = step(jax.random.key(0), zero, zero + 1.0, zero, 1.0, 1e-3, 0.5)
        >>> print(position.round(2), velocity.round(2))  # 1/2 + 1/4
        [0.75] [0.5]

    Source: Chen et al. (2014), equation 15, in the splitting of Leimkuhler and Matthews (2013), BAOAB.
    """
    kept = 1 - friction
    variance = step_size**2 / mass  # kappa
    velocity = velocity - variance * gradient  # kick
    position = position + 0.5 * velocity  # half a drift
    noise = jax.random.normal(key, position.shape, position.dtype)
    # Variance kappa stays: (1 - alpha)^2 kappa + (1 - (1 - alpha)^2) kappa.
    velocity = kept * velocity + jnp.sqrt((1 - kept**2) * variance) * noise
    return position + 0.5 * velocity, velocity


class Learning(NamedTuple):
    """What moving-window Monte Carlo EM keeps between its steps."""

    recent: Array
    """The positions of the last W steps of the chain (W, D); before W steps, the others are where it began."""
    optimizer: Any
    """State of the optimiser."""


class _Fields(NamedTuple):
    z: dict[str, Any]
    """Values in unconstrained space, of the sites and of learned parameters."""
    potential_energy: Array
    """Potential energy of the last minibatch, before the step."""
    velocity: Array
    adaptation: Adaptation
    warmup_left: Array
    heat: Array
    """Bound on the excess temperature by minibatches: 0.1 widens no variance by much more than a tenth."""
    diverging: Array
    """Whether the density or its gradient was not finite at z, and the chain went back to ``sound``."""
    rng_key: Array
    sound: dict[str, Array]
    """The last z with a finite density and gradient."""
    draws: Array
    """Number of steps after warm-up."""
    lost: Array
    """Number of the first draw after warm-up without finite density or gradient; zero as long as there is none."""
    temperature: Array
    """Mean of velocity ** 2 over its variance in equilibrium, over coordinates and draws after warm-up: near one."""
    learning: Learning | None
    """``None`` if no parameters are learned."""


class SGHMCState(_Fields):
    """State of :class:`SGHMC`; names in ``extra_fields`` of ``MCMC.run``.

    A state has tracers while a chain runs and numbers when it has ended: then a NaN draw is an error, and so is a chain
    that has diverged at finite numbers.

    Raises:
        ValueError: draws without finite density, or a temperature far above one.
    """

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> SGHMCState:
        state = super().__new__(cls, *args, **kwargs)
        if not isinstance(state.lost, jax.Array) or not is_concrete(state.lost, state.temperature):
            return state
        if state.lost.any():
            first = int(state.lost[state.lost > 0].min())
            raise expected(
                "draws with a finite density and gradient",
                f"none at draw {first} after warm-up",
                "halve step_size, take more warm-up, or start at init_to_value(values=guide.median(params, X, y))",
            )
        if (state.temperature > _HOT + _SHORT / state.draws.clip(1)).any():
            raise expected(
                "velocities of temperature one",
                f"{float(state.temperature.max()):.3g} on average over {int(state.draws.max())} draws",
                "the chain diverges: halve step_size, or take larger minibatches",
            )
        return state


_HOT = 10.0
"""Mean temperature of chains whose standard deviation is more than three times that of the target."""
_SHORT = 1000.0
"""Of n draws, ``_SHORT / n`` more is allowed: the mean of a few may be large by chance."""

_NO_DATA = "a program that observes data", "none", "pass the observations, mcmc.run(key, X, y)"


class _DrawAnew(Messenger):
    """Draws hidden layers in every run, and raises errors for sites that the chain cannot sample correctly."""

    def __enter__(self) -> Any:
        self._subsampled: set[str] = set()
        self._observes = False
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc_value, traceback)
        if exc_type is None and not self._observes:
            raise expected(*_NO_DATA)

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "plate" and msg["args"][1] not in (None, msg["args"][0]):
            self._subsampled.add(msg["name"])
        if msg["type"] != "sample":
            return
        self._observes |= msg["is_observed"]
        if msg["is_observed"]:
            return
        if site_kind(msg) == "observed":
            raise expected(*_NO_DATA)
        if site_kind(msg) == "hidden":
            hide(msg)
        elif plates := self._subsampled & {frame.name for frame in msg["cond_indep_stack"]}:
            raise expected(
                f"global sites only under plate {min(plates)!r}, which takes minibatches",
                f"the latent {msg['name']!r} there, one value per datum",
                "integrate it by a guide, dgp.guides.InducingPoint, or run without minibatches",
            )
        elif msg["fn"].support.is_discrete:
            raise expected("continuous sites", f"the discrete {msg['name']!r}", "sum it out")


class SGHMC(ProgramKernel):
    r"""Stochastic-gradient HMC, a kernel for ``numpyro.infer.MCMC`` on programs that take minibatches.

    Langevin dynamics in unconstrained space without accept-reject steps.
    During warm-up, two gradients a step, the mass becomes the root mean square of the gradient in each coordinate and
    the noise of gradients is measured; afterwards both are fixed. Steps are small and successive draws are highly
    correlated: take many, and thin.

    Hidden layers are drawn from the program in every step and are not sites of the chain. For NUTS use
    ``dgp.for_mcmc``, which samples them too. Nothing corrects the error of a finite step: halve ``step_size`` and
    compare, and look at ``heat`` (``mcmc.run(..., extra_fields=("heat",))``): variances may be too wide by that part.

    **Parameters.** ``numpyro.sample`` sites, hyperparameters among them, are sampled. With ``optim=``, the
    ``numpyro.param`` sites are learned in warm-up by moving-window Monte Carlo EM: after each step of the chain,
    ``optim`` takes a step along the gradient of the log joint density of a new minibatch, at one of the last ``window``
    positions of the chain, chosen at random. They approach a maximum of the marginal likelihood of the target of the
    chain; with one layer and Gaussian noise this is the bound of Titsias (2009). They are no faster than the chain
    follows, and a long window slows both. After warm-up they are fixed, and ``mcmc.get_samples()`` has their values
    next to each draw. Let the step size of ``optim`` fall to zero over the warm-up.

    Args:
        model: the program.
        params: values for its ``numpyro.param`` sites, for example ``svi_result.params``; with ``optim`` where they
            start.
        step_size: with ``adapt_mass`` a gradient moves a coordinate by about its square.
        friction: :math:`\alpha` in (0, 1], part of the velocity lost in a step.
        adapt_mass: learn the mass in warm-up; else it is one, and the step must suit the number of data.
        init_strategy: NumPyro's, for example ``init_to_value(values=guide.median(params, X, y))``.
        optim: an optax optimiser, which learns the ``numpyro.param`` sites in warm-up; without it they are fixed.
        window: W, the number of last positions that steps of ``optim`` choose from.

    Raises:
        ValueError: a step size or friction out of range; when run, a program that observes nothing, a latent variable
            per datum under a plate that takes minibatches, a discrete site, a ``numpyro.param`` without a value, or
            with ``optim`` no ``numpyro.param`` at all; at the end of a run, a draw without a finite density, or
            velocities more than ten times as hot as they should be: its step was too large.

    Example:
        >>> import jax, numpyro
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> import numpyro_dgp as dgp
        >>> def model(X, y, batch_size=None):
        ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(X[::20]))
        ...     with numpyro.plate("data", len(X), subsample_size=batch_size) as rows:
        ...         likelihood = dgp.Likelihood(f(X[rows]), lambda v: dist.Normal(v, 0.1))
        ...         numpyro.sample("y", likelihood, obs=y[rows])
        >>> X = jnp.linspace(0, 1, 100)[:, None]
        >>> kernel = dgp.mcmc.SGHMC(model, step_size=0.05, friction=0.05)
        >>> mcmc = MCMC(kernel, num_warmup=100, num_samples=200, thinning=10, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), X, jnp.sin(X[:, 0]), 20)
        >>> mcmc.get_samples()["f"].shape
        (20, 5)

    Source: Chen et al. (2014); Springenberg et al. (2016); for deep GPs and moving-window Monte Carlo EM Havasi et al.
    (2018); Salimbeni (2020), chapter "Impact", inference extensions.
    """

    __repr__ = brief

    def __init__(
        self,
        model: Callable[..., Any],
        params: Mapping[str, Array] | None = None,
        *,
        step_size: float = 0.03,
        friction: float = 0.05,
        adapt_mass: bool = True,
        init_strategy: Callable[..., Any] = init_to_uniform,
        optim: optax.GradientTransformation | None = None,
        window: int = 10,
    ) -> None:
        super().__init__(model, init_strategy)
        expect(_is_number(step_size) and 0 < step_size < math.inf, "a positive step_size", repr(step_size), "try 0.03")
        expect(_is_number(friction) and 0 < friction <= 1, "0 < friction <= 1", repr(friction), "try 0.05")
        expect_kind(optim, optax.GradientTransformation | None, "an optax optimiser of parameters", "optax.adam(0.01)")
        require_count("window", window, "10")
        self._model, self._params = model, require_params(params)
        self.optim, self.window = optim, window
        self._transforms: dict[str, Any] = {}  # of learned parameters
        self.step_size, self.friction, self.adapt_mass = float(step_size), float(friction), bool(adapt_mass)
        self._postprocess: Callable[..., Any] | None = None

    @property
    def model(self) -> Callable[..., Any]:
        return self._model

    def get_diagnostics_str(self, state: SGHMCState) -> str:
        return f"heat of minibatches {float(state.heat):.2f}"

    def postprocess_fn(self, model_args: tuple[Any, ...], model_kwargs: dict[str, Any] | None) -> Callable[..., Any]:
        if self._postprocess is None:
            raise expected("init before postprocess_fn", "no state", "run it by numpyro.infer.MCMC")
        return self._postprocess(*model_args, **(model_kwargs or {}))

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: dict[str, Array] | None,
        model_args: tuple[Any, ...],
        model_kwargs: dict[str, Any] | None,
    ) -> SGHMCState:
        model = handlers.substitute(self._model, data=self._params)
        require_observations_apart(model, model_args, model_kwargs or {})
        rng_key, init_key = split_keys(rng_key, 2)
        rows_key = init_key if is_prng_key(init_key) else init_key[0]
        found = initialize_model(
            init_key,
            handlers.seed(self._program, rows_key, hide_types=["sample"]),  # minibatches get a separate key
            init_strategy=self._init_strategy,
            dynamic_args=True,
            model_args=model_args,
            model_kwargs=model_kwargs,
        )
        self._postprocess = found.postprocess_fn
        params = {} if self.optim is None else self._start(found.model_trace)

        def state(key: Array, z: dict[str, Any]) -> SGHMCState:
            flat = ravel_pytree(z)[0]
            zero = jnp.zeros((), flat.dtype)
            left, still = jnp.array(num_warmup, int), jnp.zeros_like(flat)
            none = jnp.zeros((), int)
            start = Adaptation.start(flat)
            learning = None
            if self.optim is not None:
                learning = Learning(jnp.tile(flat, (self.window, 1)), self.optim.init(params))
            z = {**z, **params}
            return SGHMCState(z, zero, still, start, left, zero, jnp.array(False), key, z, none, none, zero, learning)

        z = first_position(init_params, found.param_info.z)
        return for_chains(state, rng_key, rng_key, z)

    def _start(self, sites: Trace) -> dict[str, Any]:
        """Where the parameters of the program start, in unconstrained space."""
        found = {name: site for name, site in sites.items() if site["type"] == "param"}
        expect(found, "a numpyro.param that optim learns", "none", "leave optim out: sampled sites need none")
        self._transforms = {
            name: biject_to(site["kwargs"].get("constraint", constraints.real)) for name, site in found.items()
        }
        start = transform_fn(self._transforms, {name: site["value"] for name, site in found.items()}, invert=True)
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), start)

    def potential(self, key: Array, z: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Array:
        """Negative log joint density of unconstrained values; the key chooses minibatches and hidden layers."""
        values = transform_fn(self._transforms, z)  # of parameters; NumPyro transforms those of sites
        return potential_energy(handlers.seed(self._program, key), args, kwargs, values)

    def _program(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = indexable((args, kwargs))
        fixed = (FIXED_PARAMETERS,) if self.optim is None else ()
        with (
            _DrawAnew(),
            require(ALL_ROWS, OUTSIDE_TRANSFORMATIONS, *fixed),
            handlers.substitute(data=self._params),
        ):
            return self._model(*args, **kwargs)

    def step(self, state: SGHMCState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SGHMCState:
        """One step of the dynamics."""
        rng_key, first_key, second_key, noise_key = jax.random.split(state.rng_key, 4)
        params = {name: state.z[name] for name in self._transforms}
        position, unravel = ravel_pytree({name: value for name, value in state.z.items() if name not in params})

        def potential(key: Array, flat: Array, params: dict[str, Any]) -> Array:
            return self.potential(key, {**unravel(flat), **params}, args, kwargs)

        def gradient(key: Array) -> tuple[Array, Array]:
            return jax.value_and_grad(potential, argnums=1)(key, position, params)

        energy, slope = gradient(first_key)
        warm = state.warmup_left > 0
        adapted = jax.lax.cond(
            warm, lambda old: adapt(old, slope, gradient(second_key)[1]), lambda old: old, state.adaptation
        )
        mass = adapted.mass if self.adapt_mass else jnp.ones_like(position)
        scales = self.step_size, self.friction
        moved, velocity = step(noise_key, position, state.velocity, slope, mass, *scales)
        learning = state.learning
        if learning is not None:
            window = learning.recent.at[state.warmup_left % self.window].set(moved)
            learn = partial(self._learn, jax.random.fold_in(noise_key, 1), jax.grad(potential, argnums=2))
            params, learning = jax.lax.cond(
                warm, learn, lambda params, _: (params, learning), params, learning._replace(recent=window)
            )
        draws = state.draws + ~warm
        now = jnp.mean(jnp.square(velocity) * mass) / self.step_size**2  # mean velocity^2 / kappa
        found = {**unravel(moved), **params}
        sound = jnp.isfinite(energy) & jnp.isfinite(ravel_pytree(found)[0]).all()
        proposed = SGHMCState(
            found,
            energy,
            velocity,
            adapted,
            state.warmup_left - warm,
            heat(mass, adapted.noise, *scales),
            jnp.array(False),
            rng_key,
            state.z,
            draws,
            state.lost,
            jnp.where(warm, 0.0, state.temperature + (now - state.temperature) / draws.clip(1)),
            learning,
        )
        # If a step has led to numbers that are not finite, go back, with velocity zero and another random key.
        back = state._replace(
            z=state.sound,
            potential_energy=energy,
            velocity=jnp.zeros_like(velocity),
            warmup_left=proposed.warmup_left,
            diverging=jnp.array(True),
            rng_key=rng_key,
            draws=draws,
            lost=jnp.where(state.lost > 0, state.lost, state.draws),
        )
        return jax.tree.map(partial(jnp.where, sound), proposed, back)

    def _learn(
        self, key: Array, slopes: Callable[..., Any], params: dict[str, Any], learning: Learning
    ) -> tuple[dict[str, Any], Learning]:
        """One step of the optimiser, at one of the recent positions."""
        assert self.optim is not None
        place_key, rows_key = jax.random.split(key)
        chosen = learning.recent[jax.random.randint(place_key, (), 0, self.window)]
        moves, optimizer = self.optim.update(slopes(rows_key, chosen, params), learning.optimizer, params)
        return optax.apply_updates(params, moves), learning._replace(optimizer=optimizer)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) or (isinstance(value, jax.Array) and not value.ndim)
