"""The stages of on_gpu.sh in their order: first what shows whether drot works at all, last what is slow."""

import sys
from dataclasses import dataclass
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent
#: quality → seconds for the embedded model
TINY = {"fast": 150, "balanced": 150, "best": 200}
#: benchmark of one op, with its options → seconds; those with an aim on a GPU come first
OPS = {
    "entropy_loss --repeats 20": 200,
    "pruned_importance --repeats 20": 150,
    "batched_qr --repeats 10": 90,
    "nm_mask --repeats 20": 90,
    "swiglu_rotate --repeats 20": 60,
    "rope --repeats 20": 40,
    "sparsegpt_sweep --repeats 10": 90,
    "experts --repeats 10": 60,
    "generate --repeats 3": 90,
}
#: shape and quality of a layer, with the options of bench_prune_layer.py → seconds
LAYERS_8B = {"fast --repeats 2": 120, "balanced --repeats 1": 120, "best --repeats 1": 150}
LAYERS_70B = {"fast --repeats 1": 200, "balanced --repeats 1": 240}


@dataclass(frozen=True)
class Stage:
    """One command.

    seconds: the longest that it may take. It starts only if so much time is left.
    command: its arguments; the first is a program.
    needs: the programs without which it is skipped.
    beside: whether it may run beside its neighbours of which the same is true: it compares no times.
    """

    name: str
    seconds: int
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()
    beside: bool = False


def all_stages(work: Path, folder: Path) -> list[Stage]:
    """Every stage.

    work: the folder for what goes into results.tar.gz; the rows of the benchmarks go to its folder `rows`.
    folder: the folder of the results, where the build leaves its module.
    """

    def script(name: str, options: str, *more: str) -> tuple[str, ...]:
        return (sys.executable, str(BENCHMARKS / name), *options.split(), *more)

    def rows(name: str, options: str) -> tuple[str, ...]:
        """A script that measures on the GPU and writes rows."""
        return script(name, f"--device cuda {options}", "--csv", str(work / "rows"))

    def layers(shape: str, cases: dict[str, int]) -> list[Stage]:
        return [
            Stage(
                f"layer-{shape}-{case.split()[0]}",
                seconds,
                rows("bench_prune_layer.py", f"--shape llama-3-{shape} --paper-steps 2 --quality {case}"),
            )
            for case, seconds in cases.items()
        ]

    def sanitized(tool: str) -> Stage:
        watch = ("compute-sanitizer", "--tool", tool, "--target-processes", "all", "--error-exitcode", "9")
        command = (*watch, *script("check_ops.py", "--device cuda"))
        return Stage(tool, 300, command, needs=watch[:1], beside=True)

    # the tests with the fixture `device`; what is left out needs no GPU, but data or the package datasets
    left_out = ("pipeline/test_goldens.py", "cli", "core", "text")
    tests = ["-m", "pytest", "tests", "-k", "cuda", "-m", "not slow", "-n", "12", "--durations", "10"]
    tests += [word for path in left_out for word in ("--ignore", f"tests/{path}")]
    return [
        Stage("probe", 60, script("gpu/probe.py", "--out", str(work / "probe.json"))),
        Stage("build", 300, script("gpu/build_module.py", "--out", str(folder))),
        Stage("check_ops", 200, script("check_ops.py", "--device cuda"), beside=True),
        *(
            Stage(f"tiny-{quality}", seconds, rows("tiny_llama.py", f"--quality {quality}"), beside=True)
            for quality, seconds in TINY.items()
        ),
        Stage("commands", 200, script("gpu/commands.py", "--device cuda"), beside=True),
        Stage("tests", 240, (sys.executable, *tests), beside=True),
        Stage("sparse24", 90, rows("bench_sparse24_linear.py", "--repeats 20")),
        Stage("step", 90, rows("bench_rotation_step.py", "--repeats 20")),
        *layers("8b", LAYERS_8B),
        *layers("70b", LAYERS_70B),
        *(
            Stage(op.split()[0], seconds, rows(f"bench_{op.split()[0]}.py", op.partition(" ")[2]))
            for op, seconds in OPS.items()
        ),
        Stage("optimizers", 90, rows("optimizers.py", "--synthetic 256 512 1024 2048 --steps 60")),
        *(sanitized(tool) for tool in ("memcheck", "racecheck")),
    ]
