"""Random programs under random guides have the properties of ``program_checks``. ``benchmarks/random_programs.py`` runs
hundreds of them."""

import pytest
from generated_guides import GUIDES, guides_of
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from program_checks import check, random_case
from program_generator import random_program

options = dict(  # the same programs in every run, and no search for a smaller one: each costs seconds
    derandomize=True, deadline=None, database=None, print_blob=False, suppress_health_check=list(HealthCheck),
)  # fmt: skip
seeds = st.integers(0, 10**6)


@pytest.mark.long
@settings(phases=[Phase.explicit], **options)
@example(seed=2)
@given(seed=seeds)
def test_a_few(seed, tmp_path_factory):
    check(*random_case(seed), tmp_path_factory.mktemp("params"))


@pytest.mark.long
@settings(max_examples=8, phases=[Phase.generate], **options)
@given(seed=seeds)
def test_many(seed, tmp_path_factory):
    check(*random_case(seed), tmp_path_factory.mktemp("params"))


def test_every_part_is_drawn():
    """What a program can be made of occurs among the first programs, and every guide applies to some."""
    programs = [random_program(seed) for seed in range(1500)]
    assert {name for program in programs for name in guides_of(program)} == set(GUIDES)
    assert {program.batch for program in programs} == {None, "plate", "arguments"}
    assert {program.latent for program in programs} == {0, 1, 2}
    assert {len(program.groups) for program in programs} == {0, 1, 2}
    assert {f.form for program in programs for f in program.functions.values()} == {"points", "grid", "exact"}
    assert any(len(set(program.levels)) < len(program.levels) for program in programs)  # one function, two levels
    for part in ("skip", "project", "mask", "drawn", "mix", "second", "scale", "lengths", "follow", "is_exact"):
        assert {bool(getattr(program, part)) for program in programs} == {False, True}
