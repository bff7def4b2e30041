"""Graphs of peers."""

import itertools

import numpy as np
import pytest
from experiments import digits, experiment, finished
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.algorithms import Adjacency, Complete, ErdosRenyi, PeerAlgorithm, Ring, Torus
from fl_lightning.core.errors import ConfigError

MATRIX = np.array([[1, 1, 0], [0, 1, 1], [1, 1, 0]])  # directed, with two self-links


def links(graph, clients, seed=0):
    matrix = graph.links(clients, np.random.default_rng(seed))
    assert matrix.shape == (clients, clients)
    assert matrix.dtype == bool
    return [set(row.nonzero()[0].tolist()) for row in matrix]


def run_links(tmp_path, graph, seed=0):
    run = experiment(tmp_path, PeerAlgorithm(graph=graph), seed=seed)
    run.load()
    return run.state["links"]["matrix"].numpy()


@given(st.integers(1, 12))
def test_complete_links_all_others(clients):
    assert links(Complete(), clients) == [set(range(clients)) - {i} for i in range(clients)]


@given(st.integers(1, 12), st.integers(1, 8))
def test_ring_links_neighbours_on_both_sides(clients, reach):
    for i, heard in enumerate(links(Ring(reach), clients)):
        around = {(i + step) % clients for step in range(-reach, reach + 1)}
        assert heard == around - {i}


@given(st.integers(1, 5), st.integers(1, 5))
def test_torus_links_four_neighbours(rows, columns):
    for i, heard in enumerate(links(Torus(rows), rows * columns)):
        row, column = divmod(i, columns)
        steps = [(row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)]
        assert heard == {r % rows * columns + c % columns for r, c in steps} - {i}


@pytest.mark.parametrize(("clients", "rows"), [(1, 1), (2, 1), (6, 2), (12, 3), (7, 1), (16, 4), (30, 5)])
def test_torus_is_as_square_as_possible_by_default(clients, rows):
    assert links(Torus(), clients) == links(Torus(rows), clients)


@given(st.integers(1, 15), st.floats(0, 1), st.integers(0, 99))
def test_erdos_renyi_is_symmetric_without_self_links(clients, p, seed):
    matrix = ErdosRenyi(p).links(clients, np.random.default_rng(seed))
    assert (matrix == matrix.T).all()
    assert not matrix.diagonal().any()


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_erdos_renyi_links_the_given_share_of_pairs(p):
    matrix = ErdosRenyi(p).links(200, np.random.default_rng(0))
    pairs = [matrix[i, j] for i, j in itertools.combinations(range(200), 2)]
    assert np.mean(pairs) == pytest.approx(p, abs=4.5 * (p * (1 - p) / len(pairs)) ** 0.5)


def test_erdos_renyi_depends_on_the_seed_of_the_run(tmp_path):
    graph = ErdosRenyi(0.5)
    drawn = [run_links(tmp_path / str(seed), graph, seed) for seed in (0, 0, 1)]
    assert (drawn[0] == drawn[1]).all()
    assert (drawn[0] != drawn[2]).any()


@pytest.mark.parametrize("form", ["spaces.txt", "commas.csv", "loose.csv", "binary.npy"])
def test_adjacency_reads_the_file_without_self_links(tmp_path, form):
    path = tmp_path / form
    if form == "binary.npy":
        np.save(path, MATRIX)
    else:
        separator = {"spaces.txt": " ", "commas.csv": ",", "loose.csv": " ,  "}[form]
        path.write_text("\n".join(separator.join(map(str, row)) for row in MATRIX) + "\n")
    assert links(Adjacency(str(path)), 3) == [{1}, {2}, {0, 1}]


@pytest.mark.parametrize(
    "content",
    ["0 1\n1 0\n", "0 1 0\n1 0 1\n", "0 1 0\n1 0 2\n0 1 0\n", "0 .5 0\n1 0 1\n0 1 0\n", "0 nan 0\n1 0 1\n0 1 0"],
)
def test_a_matrix_of_wrong_size_or_numbers_is_refused(tmp_path, content):
    path = tmp_path / "graph.txt"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"^algorithm.graph.path: .*graph.txt .* 3 rows"):
        Adjacency(str(path)).links(3, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("words.txt", b"a b\nc d\n"),
        ("ragged.txt", b"0 1\n1\n"),
        ("empty.npy", b""),
        ("binary.txt", bytes(range(256))),
        ("text.npy", b"0 1\n1 0\n"),
        ("cut.npy", b"\x93NUMPY\x01\x00v\x00{'descr'"),
    ],
)
def test_an_unreadable_file_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"algorithm.graph.path: .*{name} cannot be read: ."):
        Adjacency(str(tmp_path / name)).links(2, np.random.default_rng(0))


def test_a_missing_file_is_refused_before_round_1(tmp_path):
    run = experiment(tmp_path / "run", PeerAlgorithm(graph=Adjacency("nowhere.txt")))
    with pytest.raises(ConfigError, match=r"^algorithm.graph.path: nowhere.txt .*No such file"):
        run.fit()
    assert not (tmp_path / "run").exists()


def test_options_out_of_range_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"algorithm.graph.reach: 0 is below 1"):
        Ring(0)
    for p in (-0.1, 1.1):
        with pytest.raises(ConfigError, match=rf"algorithm.graph.p: {p} is outside \[0, 1\]"):
            ErdosRenyi(p)
    for rows in (4, 5):
        with pytest.raises(ConfigError, match=rf"algorithm.graph.rows: 6 clients do not fill {rows} rows"):
            run_links(tmp_path, Torus(rows))


def test_a_client_without_peers_collects_nothing(tmp_path):
    (tmp_path / "graph.txt").write_text("0 1 1\n0 0 0\n1 0 0\n")
    algorithm = PeerAlgorithm(graph=Adjacency(str(tmp_path / "graph.txt")))
    run = finished(tmp_path / "run", algorithm, scenario=digits(3), clients_per_round=3, rounds=2)
    assert [run.server.download(3, client).nbytes > 0 for client in range(3)] == [True, False, True]
