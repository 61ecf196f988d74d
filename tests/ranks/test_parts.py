"""How the work is divided, in one process: the parts of all ranks are the whole."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runs import recipe
from small_models import random_rotation, random_tokens, small_model

from drot.calibration.stream import CalibrationStream
from drot.calibration.token_weights import TokenWeights
from drot.config import resolve
from drot.core.events import silent
from drot.machine.ranks import ALONE, Ranks
from drot.model.decoder import DecoderModel
from drot.model.rotation import Boundary, rotated_hessian
from drot.pipeline import training
from drot.pipeline.batches import Batches
from drot.pipeline.context import RunContext
from drot.pipeline.memory import main_memory, objective_bytes, training_memory
from drot.pipeline.sizes import sizes_of
from drot.rotation.work import work_of_ranks


@given(
    whole=st.lists(st.integers(1, 100), max_size=5),
    divisible=st.integers(0, 400),
    ranks=st.integers(1, 9),
)
def test_work_is_given_out_once_and_evenly(whole, divisible, ranks):
    owners, stops = work_of_ranks(dict(enumerate(whole)), divisible, ranks)
    assert len(stops) == ranks + 1 and stops[0] == 0 and stops[-1] == 1 and stops == sorted(stops)
    loads = [divisible * (stop - start) for start, stop in itertools.pairwise(stops)]
    for piece, owner in owners.items():
        loads[owner] += whole[piece]
    assert sum(loads) == pytest.approx(sum(whole) + divisible)
    # no rank is above the mean unless a single piece, or pieces that were given out before, are
    mean = sum(loads) / ranks
    assert max(loads) <= max(mean, max(whole, default=0) + sum(whole) / ranks) + 1e-9


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_each_sequence_is_trained_once_in_an_epoch_or_held_out(monkeypatch, size, batch):
    total = 11
    monkeypatch.setattr(Ranks, "total", lambda self, value: total)
    trained, held_out, sizes = [], [], []
    for rank in range(size):
        ranks = Ranks(rank, size)
        own = list(ranks.sequences(total))
        batches = Batches(len(own), batch, ranks, seed=3)
        epoch = list(batches.epoch())
        assert len(epoch) == batches.steps
        trained += [own[i] for part, count, _ in epoch for i in part[:count].tolist()]
        held_out += [own[i] for part in batches.held_out() for i in part.tolist()]
        sizes.append([(count, size) for _, count, size in epoch])
    assert sorted(trained) + held_out == list(range(total))
    for of_ranks in zip(*sizes, strict=True):  # what every rank takes for the size of a batch is its size
        assert {size for _, size in of_ranks} == {sum(count for count, _ in of_ranks)}
    assert batches.trained_count + batches.held_out_count == total


@given(st.integers(0, 50), st.integers(1, 9))
def test_the_shares_of_rows_are_all_rows(count, size):
    shares = [Ranks(rank, size).share(count) for rank in range(size)]
    assert [row for share in shares for row in range(count)[share]] == list(range(count))
    assert max(s.stop - s.start for s in shares) <= math.ceil(count / size)


def test_a_process_alone_sends_nothing():
    rows = torch.ones(2, 3)
    ALONE.add_(rows)
    ALONE.gather_rows_(rows)
    assert not ALONE.sent
    assert ALONE.gather_rows(rows) is rows and ALONE.total(2) == 2 and ALONE.each("a") == ["a"]
    assert ALONE.on_first(lambda: 5) == 5 and ALONE.same([rows]) and ALONE.who_ended() is None


class OwnRows(Ranks):
    """A rank that sends nothing: what it would gather are its own rows."""

    def gather_rows(self, rows):
        return rows


def test_ranks_compute_rows_of_a_rotated_hessian_and_of_a_boundary():
    """The rows of all ranks are RᵀHR and R1ᵀ R1', computed here as one product in fp64."""
    layer = DecoderModel(small_model("llama")).layers[0]
    group = next(each for each in layer.groups if each.linears[0].input == "r1")
    rotation, following = (draw_orthogonal(seed, layer) for seed in (1, 2))
    x = torch.randn(50, len(rotation.r1), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    hessian, r1 = x.T @ x, rotation.r1
    boundary = Boundary("input", r1, following.r1)
    ranks = [OwnRows(rank, 3) for rank in range(3)]
    rows = [rotated_hessian(group, hessian, rotation, layer.heads, each) for each in ranks]
    torch.testing.assert_close(torch.cat(rows), torch.einsum("ai,ab,bj->ij", r1, hessian, r1))
    rows = [boundary.matrix(each) for each in ranks]
    torch.testing.assert_close(torch.cat(rows), torch.einsum("ai,aj->ij", r1, following.r1))
    assert torch.equal(boundary.matrix(), r1.T @ following.r1)


def draw_orthogonal(seed, layer):
    return random_rotation(len(layer.norms[0].weight), layer.heads, torch.Generator().manual_seed(seed))


def test_a_rank_without_a_sequence_weighs_outputs_as_the_others_do():
    """It has no Hessian to add, but its share of the objective."""
    handle, tokens = DecoderModel(small_model("llama")), random_tokens(1, 16)
    weights = TokenWeights({}, {})
    for rank in range(2):
        stream = CalibrationStream.embed(
            handle, tokens, torch.device("cpu"), ranks=Ranks(rank, 2), weights=weights
        )
        assert len(stream.hidden_states) == 1 - rank and stream.weights is weights


def test_layers_in_main_memory_are_counted_whole_for_each_rank():
    """Each rank keeps the objective of every layer, and copies of its own rows."""
    model = DecoderModel(small_model("llama"))
    offloaded, together = (
        resolve(recipe("shared", layers_per_step=count, down_rotation="none")) for count in (1, 0)
    )
    sizes = sizes_of(model, 8, 16)
    whole = sum(objective_bytes(sizes, offloaded))

    def needed(ranks):
        counted = main_memory(sizes, offloaded, torch.float32, ranks=Ranks(size=ranks))
        return counted - ranks * main_memory(sizes, together, torch.float32)

    assert [needed(ranks) for ranks in (1, 2, 4)] == [whole, 3 * whole, 5 * whole]


@pytest.mark.parametrize(("room", "layers"), [(0.5, 1), (2.5, 3), (9, 4)])
def test_a_gpu_gets_the_layers_of_the_next_batch_that_it_has_room_for(room, layers, monkeypatch):
    model, tokens = small_model("llama", num_hidden_layers=6), random_tokens(8, 16)
    run = RunContext(model, resolve(recipe()), tokens, torch.device("cpu"), silent, ranks=Ranks(size=4))
    assert training.layers_ahead(run) == 1
    needed = max(run.device_memory, training_memory(run.sizes, run.recipe))
    layer = sum(parameter.nbytes for parameter in run.model.layers[0].module.parameters())
    monkeypatch.setattr(training, "is_gpu", lambda device: True)
    monkeypatch.setattr(training, "free_memory", lambda device: needed + int(room * layer))
    assert training.layers_ahead(run) == layers
