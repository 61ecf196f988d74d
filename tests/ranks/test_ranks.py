"""Several ranks, as processes that torchrun would start: what they send, and a run of `drot.prune`."""

import ctypes
import datetime
import math
import multiprocessing
import os
import time

import pytest
import torch
import torch.distributed as dist
from runs import TOKENS, assert_patterns, interrupted, prune, recipe, saved_bytes, saved_tensors
from small_models import small_model
from together import become_rank, free_port, on_ranks, start_server

import drot
import drot.machine.ranks
from drot.config import Recipe
from drot.core.errors import ToldElsewhere, UserError
from drot.machine.ranks import RankEnded, Ranks, joined
from drot.model.decoder import DecoderModel
from drot.pruning.solve import ADMM_INTERVAL
from drot.reporting.demo import HELD_OUT, MODEL

pytestmark = pytest.mark.slow

# ---- what is sent ------------------------------------------------------------------------------------


def sums_and_rows(total):
    with joined() as ranks:
        each = torch.arange(total * 2, dtype=torch.float32).view(total, 2).T[:, ranks.share(total)].T
        ones = torch.ones(2, 3).T * (ranks.rank + 1)  # not contiguous
        ranks.add_(ones)
        rows = {
            dtype: ranks.gather_rows(each.to(dtype)) for dtype in (torch.float32, torch.bfloat16, torch.bool)
        }
        return ones, rows, ranks.total(0.25), ranks.each(ranks.rank), ranks.on_rank(1, lambda: ranks.rank)


@pytest.mark.parametrize("total", [2, 5, 6])
def test_sums_and_rows_are_those_of_all_ranks(total):
    expected = torch.arange(total * 2, dtype=torch.float32).view(total, 2)
    for ones, rows, quarter, each, first in on_ranks(3, sums_and_rows, total):
        assert torch.equal(ones, torch.full((3, 2), 6.0))
        assert all(torch.equal(found, expected.to(dtype)) for dtype, found in rows.items())
        assert (quarter, each, first) == (0.75, [0, 1, 2], 1)


def gathered_parts(parts, rows):
    with joined() as ranks:
        found = []
        for columns in (3, 5):  # the first 3 columns of 5 are not contiguous
            matrix = torch.full((rows, columns), -1.0)[:, :3]
            matrix[parts[ranks.rank]] = float(ranks.rank)
            ranks.gather_rows_(matrix, parts)
            found.append(matrix[:, 0].tolist())
        return found


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([slice(0, 2), slice(2, 4), slice(4, 6)], [0, 0, 1, 1, 2, 2]),
        ([slice(1, 3), slice(3, 5), slice(5, 7)], [-1, 0, 0, 1, 1, 2, 2, -1]),
        ([slice(4, 6), slice(2, 4), slice(0, 2)], [2, 2, 1, 1, 0, 0]),
        ([slice(6, 8), slice(4, 6), slice(2, 4)], [-1, -1, 2, 2, 1, 1, 0, 0]),
        ([slice(0, 1), slice(1, 3), slice(3, 5)], [0, 1, 1, 2, 2, -1]),
        ([slice(4, 5), slice(2, 4), slice(0, 2)], [2, 2, 1, 1, 0]),
        ([slice(0, 0), slice(0, 1), slice(1, 2)], [1, 2]),
    ],
)
def test_parts_of_rows_are_gathered_wherever_they_lie(parts, expected):
    assert on_ranks(3, gathered_parts, parts, len(expected)) == [[expected] * 2] * 3


def ranks_of_a_machine():
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(int(os.environ["RANK"]) % 2)}
    with joined() as ranks:
        return ranks.size, ranks.local_size


def test_a_rank_knows_how_many_share_its_machine():
    assert on_ranks(4, ranks_of_a_machine) == [(4, 2)] * 4


def differing_bits():
    with joined() as ranks:
        equal, other = torch.ones(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.float64)
        other[2] += ranks.rank * 2.0**-52
        return ranks.same([equal]), ranks.same([equal, other])


def test_a_bit_that_differs_is_found():
    assert on_ranks(2, differing_bits) == [(True, False)] * 2


def failing_on(rank):
    def fail():
        raise UserError("this rank alone")

    with joined() as ranks:
        if ranks.rank == rank:
            fail()
        ranks.total(1.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_is_told_by_the_rank_that_has_it(rank):
    found = on_ranks(2, failing_on, rank, last_words=1.0)
    assert isinstance(found[rank], UserError) and "this rank alone" in str(found[rank])
    assert isinstance(found[1 - rank], ToldElsewhere | RankEnded)


def starting_without(rank):
    drot.machine.ranks.JOIN = datetime.timedelta(seconds=3)  # of this process, which ends with the test
    if int(os.environ["RANK"]) != rank:
        with joined() as ranks:
            return ranks.total(1.0)
    return "ended"


def test_a_rank_that_does_not_start_ends_the_others():
    found = on_ranks(3, starting_without, 1, last_words=1.0)
    assert isinstance(found[0], RankEnded) and "rank 1 has ended at the start" in str(found[0])
    assert found[1] == "ended" and isinstance(found[2], ToldElsewhere)


def waiting_in_c(rank, port, file):
    """A rank that waits as for a GPU: in C, where Python hears no signal. Rank 1 ends without a word."""
    become_rank(rank, 3, port)
    drot.machine.ranks.BEAT, drot.machine.ranks.LOOKS, drot.machine.ranks.LAST_WORDS = 0.2, 3, 1.5
    os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), 2)
    with joined() as ranks:
        ranks.each(None)
        time.sleep(2)  # all hearts have beaten
        ranks.where, ranks.then = "the step prune of layer 3", "; go on"
        if rank == 1:
            os._exit(7)
        ctypes.CDLL(None).sleep(60)


def test_a_rank_that_waits_for_a_dead_rank_without_an_error_ends(tmp_path):
    file, port = tmp_path / "stderr", free_port()
    file.touch()
    start_server()
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=waiting_in_c, args=(rank, port, file)) for rank in range(3)]
    for process in processes:
        process.start()
    store = dist.TCPStore("127.0.0.1", port, is_master=True)
    for process in processes:
        process.join(50)
    del store
    assert [process.exitcode for process in processes] == [2, 7, 2]
    assert file.read_text() == "drot: rank 1 has ended at the step prune of layer 3; go on\n"


def twice():
    found = []
    for number in range(2):
        try:
            with joined() as ranks:
                found.append(ranks.total(1.0))
                raise UserError(f"error {number}")
        except UserError as error:
            found.append(str(error))
    return found


def test_a_program_may_catch_an_error_and_join_again():
    first, second = on_ranks(2, twice, last_words=1.0)
    assert first[::2] == second[::2] == [2.0, 2.0]
    assert [error.split(":")[-1] for error in first[1::2]] == ["error 0", "error 1"]


def sent_by_a_run(chosen):
    made, init = [], Ranks.__init__

    def noted(self, *arguments, **options):
        init(self, *arguments, **options)
        made.append(self)

    Ranks.__init__ = noted  # of this process, which ends with the test
    _, figures = run(chosen)
    iterations = [{name: figure.admm_iterations for name, figure in layer.items()} for layer in figures]
    return made[0].sent, iterations  # the others are of its heart


@pytest.mark.parametrize("target", ["self", "dense"])
def test_the_bytes_are_those_of_the_formula(target):
    """The first four rows of the table in docs/scale.md, for two ranks and weights in fp32."""
    found = on_ranks(2, sent_by_a_run, recipe("none", solve="admm", target=target))
    sums = rows = 0
    for layer, iterations in zip(DecoderModel(small_model("llama")).layers, found[0][1], strict=True):
        for group in layer.groups:
            # two numbers in fp64 whenever ADMM looks how many weights have moved
            sums += 2 * 8 * (iterations[group.linears[0].name] // ADMM_INTERVAL)
            shapes = [layer.shape_of(linear) for linear in group.linears]
            out, width = shapes[0]
            statistics = 4 * (out if layer.adds(group) else width) * width if target == "dense" else 0
            sums += 4 * width**2 + statistics  # 2 (n - 1) / n times
            # the weights of tokens and outputs
            sums += 4 * TOKENS.numel() + 4 * sum(out for out, _ in shapes)
            rows += sum(4 * math.ceil(out / 2) * width for out, width in shapes)
    for sent, _ in found:
        assert dict(sent) == {"sums": sums, "rows": rows}


# ---- a run -------------------------------------------------------------------------------------------


def run(chosen, folder=None, **options):
    out = None if folder is None else folder / "out"
    result = prune(chosen=chosen, out=out, **options)
    figures = [layer.linears for layer in result.manifest.layers]
    return result.model.state_dict() if folder is None else None, figures


def errors(figures):
    return torch.tensor([linear.output_error for layer in figures for linear in layer.values()])


@pytest.mark.parametrize(
    "fields",
    [
        dict(method="magnitude", sparsity="0.5", solve="none"),
        dict(method="wanda", solve="none"),
        dict(sparsity="0.5", solve="none"),
        dict(solve="admm", target="dense"),
    ],
    ids=["magnitude", "wanda", "sparsegpt by a ratio", "admm"],
)
def test_ranks_prune_as_one_does(fields):
    """Up to the order of the sums of a Hessian, which can move a mask where scores are nearly equal."""
    chosen = recipe("none", **{"target": "self"} | fields)
    alone, figures = run(chosen)
    others = on_ranks(3, run, chosen)
    first, found = others[0]
    for state, of_rank in others[1:]:
        assert all(torch.equal(first[name], tensor) for name, tensor in state.items())
        assert torch.equal(errors(of_rank), errors(found))
    assert torch.allclose(errors(found)[:4], errors(figures)[:4], rtol=1e-3)  # of the first attention
    assert torch.allclose(errors(found), errors(figures), rtol=0.15)
    name = "model.layers.0.self_attn.q_proj.weight"  # before differences of the layers add up
    assert ((first[name] == 0) == (alone[name] == 0)).float().mean() > 0.99
    if fields["method" if "method" in fields else "solve"] == "magnitude":
        assert all(torch.equal(alone[name], tensor) for name, tensor in first.items())


@pytest.mark.parametrize(
    "fields",
    [
        dict(quality="best", recover="block"),
        dict(mode="shared"),
        dict(hessians="dense", layers_per_step=0),
        dict(layers_per_rotation=2),
    ],
)
def test_ranks_rotate_recover_and_write_one_checkpoint(fields, tmp_path):
    chosen = recipe(**{"recover_epochs": 1, "recover_batch": 4} | fields)
    (tmp_path / "ranks").mkdir()
    found = on_ranks(2, run, chosen, tmp_path / "ranks")
    assert not isinstance(found[0], BaseException), found[0]
    assert not isinstance(found[1], BaseException), found[1]
    result = prune(chosen=chosen, out=tmp_path / "alone")
    alone = [layer.linears for layer in result.manifest.layers]
    assert torch.equal(errors(found[0][1]), errors(found[1][1]))
    assert torch.allclose(errors(found[0][1]).log(), errors(alone).log(), atol=0.3)
    loaded = drot.load(tmp_path / "ranks" / "out", device="cpu")
    assert_patterns(loaded, chosen.pruning)
    assert saved_tensors(tmp_path / "ranks" / "out").keys() == saved_tensors(tmp_path / "alone").keys()


def cut_off(chosen, folder):
    return interrupted(None, chosen, at=("prune", 1), out=folder / "out")


def test_another_number_of_ranks_goes_on(tmp_path):
    chosen = recipe("layer", solve="none", target="self")
    # rank 0 is interrupted, and the other ends with it
    found = on_ranks(2, cut_off, chosen, tmp_path, last_words=1.0)
    assert found[0] is None and isinstance(found[1], BaseException)
    before = (tmp_path / "out.partial" / "layer_00000.safetensors").read_bytes()
    _, figures = run(chosen, tmp_path, resume=True)
    assert len(figures) == 3
    assert before in saved_bytes(tmp_path / "out")


def with_other(what, folder):
    other = os.environ["RANK"] == "1"
    if what == "recipe":
        return run(recipe("none", seed=1) if other else recipe("none"), folder)
    model = small_model("llama")
    if what == "weights" and other:
        model.model.layers[1].mlp.down_proj.weight.data[3, 5] += 1
    return prune(model, recipe("none"), out=folder / "out").manifest.sparsity


@pytest.mark.parametrize("what", ["recipe", "weights"])
def test_a_rank_that_does_another_run_is_refused(what, tmp_path):
    (tmp_path / what).mkdir()
    first, second = on_ranks(2, with_other, what, tmp_path / what)
    assert isinstance(first, UserError) and isinstance(second, ToldElsewhere)
    assert "in rank 1" in str(first) and ("seed" in str(first) or "weights" in str(first))
    assert not list((tmp_path / what).glob("*"))


def test_too_many_ranks_are_refused():
    chosen = recipe("none", nsamples=2)
    for found in on_ranks(3, prune_two, chosen, last_words=1.0):
        assert isinstance(found, UserError)


def prune_two(chosen):
    return prune(chosen=chosen, calibration=TOKENS[:2]).manifest.sparsity


def test_a_text_with_fewer_sequences_than_ranks_is_refused(tmp_path):
    """The text has two of the nine sequences that are asked for. A rank without one would have no Hessian."""
    text = tmp_path / "short.txt"
    text.write_text(HELD_OUT.read_text(encoding="utf-8")[:500], encoding="utf-8")
    first, *others = on_ranks(3, prune_text, text)
    assert isinstance(first, UserError) and "3 ranks need at least 3 calibration sequences" in str(first)
    assert all(isinstance(found, UserError) for found in others)


def prune_text(text):
    chosen = Recipe().replace(mode="none", source=str(text), nsamples=9, seqlen=64)
    return drot.prune(MODEL, chosen, device="cpu").manifest.sparsity
