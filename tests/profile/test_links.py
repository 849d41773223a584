"""Links from measured transfers: known links come out, and find their place in the cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.cluster import Link, Rank, equal_ranks
from pipeplan.profile.links import Transfer, directions_that_differ, fit_link, fit_links, with_links

SIZES = [2**power for power in range(10, 27, 2)]


def transfers(link: Link, noise: float = 0.0) -> list[Transfer]:
    """What a link takes for every size; every second one slower by ``noise``, the others quicker."""
    return [
        Transfer(size, link.transfer_ns(size) * (1 + (noise if number % 2 else -noise)))
        for number, size in enumerate(SIZES)
    ]


@given(st.integers(1_000, 2_000_000), st.floats(0.1, 900.0))
def test_a_links_own_times_give_the_link_back(latency_ns: int, gb_per_s: float) -> None:
    """Latency and bandwidth of an exact link come out, whatever their ratio."""
    found = fit_link(transfers(Link(latency_ns, gb_per_s)))
    assert found.link.latency_ns == pytest.approx(latency_ns, rel=0.01)
    assert found.link.gb_per_s == pytest.approx(gb_per_s, rel=0.01)
    assert found.relative_error < 1e-3


def test_noise_is_averaged_and_reported() -> None:
    """Five percent of noise moves neither figure by as much, and shows in the error."""
    found = fit_link(transfers(Link(100_000, 10.0), noise=0.05))
    assert found.link.latency_ns == pytest.approx(100_000, rel=0.05)
    assert found.link.gb_per_s == pytest.approx(10.0, rel=0.05)
    assert found.relative_error == pytest.approx(0.05, rel=0.2)


def test_no_figure_is_negative() -> None:
    """Times that shrink with the size, as noise may make them, give a link with no latency or a very quick one."""
    shrinking = fit_link([Transfer(size, 1e6 - number) for number, size in enumerate(SIZES)]).link
    assert shrinking.latency_ns == pytest.approx(1e6, rel=0.01)
    assert shrinking.gb_per_s > 1000
    growing = fit_link([Transfer(size, float(size) ** 1.2) for size in SIZES]).link
    assert growing.latency_ns >= 0


def test_directions_are_pooled_and_compared() -> None:
    """One link a pair from both directions; a pair with a slow way back is named."""
    quick, slow = Link(10_000, 10.0), Link(10_000, 5.0)
    measured = {
        (0, 1): transfers(quick),
        (1, 0): transfers(quick),
        (1, 2): transfers(quick),
        (2, 1): transfers(slow),
    }
    fitted = fit_links(measured)
    assert fitted.keys() == {(0, 1), (1, 2)}
    assert fitted[0, 1].link.gb_per_s == pytest.approx(10.0, rel=0.01)
    assert 5.0 < fitted[1, 2].link.gb_per_s < 10.0
    [(pair, there, back)] = directions_that_differ(measured)
    assert pair == (1, 2)
    assert (there.gb_per_s, back.gb_per_s) == (pytest.approx(10.0, rel=0.01), pytest.approx(5.0, rel=0.01))


def test_links_find_their_place() -> None:
    """Every pair keeps its own link; within and between nodes get medians, and stay where nothing was measured."""
    cluster = replace(
        equal_ranks(3, "cpu"),
        ranks=(Rank("cpu", node=0), Rank("cpu", node=0), Rank("cpu", node=1)),
        between_nodes=Link(7, 7.0),
    )
    near, far, farther = Link(1_000, 100.0), Link(9_000, 10.0), Link(11_000, 20.0)
    found = with_links(cluster, {(0, 1): near, (0, 2): far, (1, 2): farther})
    assert found.within_node == near
    assert found.between_nodes == Link(10_000, 15.0)
    assert found.link(2, 1) == farther
    assert with_links(cluster, {(0, 1): near}).between_nodes == Link(7, 7.0)
