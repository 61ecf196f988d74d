"""The documentation: its commands and notebook run, its links and options exist, its figures are rows."""

import dataclasses
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import drot
from drot.cli import app as cli
from drot.cli.commands import COMMANDS, imported
from drot.model.families import FAMILIES
from drot.model.family import by_module
from drot.reporting.demo import CALIBRATION, HELD_OUT, MODEL
from drot.serving import sglang, vllm

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="needs the checkout")

#: In the order in which a reader meets them. The commands of a page find what earlier pages wrote.
PAGES = ["README.md", *(f"docs/{name}.md" for name in (
    "index", "choose", "judge", "deploy", "hardware", "scale", "repeat", "finetune", "troubleshooting"
))]  # fmt: skip
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
#: programs that install, build or need GPUs; `.ci/run` runs make and pip
NOT_RUN = (
    *("pip", "make", "docker", "accelerate", "torchrun", "python", "git", "cd", "nvidia-smi"),
    "examples/serve_vllm.sh",
)
#: commands that take minutes or wait for somebody, and the tests that run the same code
LONG = {
    "drot chat": "tests/serving/test_chat.py",
    "drot serve": "tests/serving/test_serve.py",
    "drot demo": "tests/reporting/test_demo.py",
    "drot prune meta-llama/Llama-3.1-70B": "tests/ranks/test_ranks.py",
    "drot bench --shape": "tests/evaluation/test_speed.py",
    "drot run": "tests/evaluation/test_tasks.py",
}
#: command → options behind its own, with which it takes seconds
SHORTER = {
    "prune": ["--nsamples", "8", "--steps", "5"],
    "finetune": ["--nsamples", "8"],  # in place of 4096
    "bench": ["--batch", "1", "--repeats", "1"],
    "report": ["--linears", "*.down_proj"],
}
#: characters of the texts here
TEXT_LENGTH = 8_000
#: names of models in the documentation, which stand for a small random model here
MODELS = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B", "MODEL")


def commands(page: str) -> Iterator[str]:
    """The commands of a page's bash blocks, without comments; lines that end with a backslash are joined."""
    for block in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"\s+#.*", "", line).strip()
            if line and not line.startswith("#"):
                yield line


def python_blocks(page: str) -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def test_every_page_with_commands_is_listed() -> None:
    pages = ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
    assert {page for page in pages if any(commands(page)) or python_blocks(page)} <= set(PAGES)


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    """A folder with a small random model and the texts that the documentation names."""
    folder = tmp_path_factory.mktemp("docs")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    text = HELD_OUT.read_text()
    for name in ("text.txt", "mine.txt"):
        (folder / name).write_text(text[:TEXT_LENGTH])
    lines = [json.dumps({"text": part}) for part in text.split("\n\n")[:400]]
    (folder / "mine.jsonl").write_text("\n".join(lines))
    (folder / "grid.yaml").write_text(
        f"model: {folder}/model\nbase: {{rotation: {{steps: 2}}, calibration: {{nsamples: 4}}}}\n"
        "grid: {mode: [none, layer]}\ntexts: [text.txt]\n"
    )
    return folder


def fake_load_dataset(*args, streaming: bool = False, **kwargs):
    """The rows of any dataset: paragraphs of the embedded text, since tests have no network."""
    import datasets

    parts = Path(CALIBRATION.source).read_text()[:TEXT_LENGTH].split("\n\n")
    rows = datasets.Dataset.from_list([{"text": part} for part in parts])
    return rows.to_iterable_dataset() if streaming else rows


@pytest.mark.slow
def test_the_commands_of_the_pages_run(desk: Path, monkeypatch, capsys) -> None:
    """In one test, since the commands of a page read what earlier pages wrote."""
    monkeypatch.chdir(desk)
    monkeypatch.setattr("datasets.load_dataset", fake_load_dataset)
    for page in PAGES:
        for line in commands(page):
            words = shlex.split(line)
            if words[0] in NOT_RUN or any(line.startswith(long) for long in LONG):
                continue
            assert words[0] == "drot", f"{page}: {line}"
            arguments = [str(desk / "model") if word in MODELS else word for word in words[1:]]
            if (
                "--out" in arguments and "--resume" not in arguments
            ):  # a page may repeat a command of another page
                out = Path(arguments[arguments.index("--out") + 1])
                shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)
            shorter = SHORTER.get(arguments[0], [])
            if "--rotations" in arguments:  # which are not trained
                shorter = shorter[:2]
            status = cli.run(arguments + shorter)
            assert status == 0, f"{page}: {line}\n{capsys.readouterr().err}"
    blocks = [(page, code) for page in PAGES for code in python_blocks(page)]
    assert len(blocks) > 1
    for page, code in blocks:
        for model in MODELS:
            code = code.replace(f'"{model}"', repr(str(desk / "model")))
        exec(compile(code, f"{page}, python", "exec"), {})


def test_the_tests_of_long_commands_exist() -> None:
    assert all((ROOT / test).is_file() for test in LONG.values())


#: what a cell of the notebook has → what runs here
SHORTER_CELLS = {
    "nsamples=40": "nsamples=4",
    "held_out=8": "held_out=2",
    "seqlen=256": "seqlen=128",
    "steps=10": "steps=3",
    '.with_quality("fast")': '.with_quality("fast").replace(**drot.config.ONE_SHOT)',
}


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch, capsys) -> None:
    notebook = json.loads((ROOT / "docs/python.ipynb").read_text())
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(HELD_OUT.read_text()[:3000])
    short = dataclasses.replace(drot.DEMO, held_out=tmp_path / "text.txt")
    monkeypatch.setattr("drot.reporting.demo.DEMO", short)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 5
    names: dict[str, object] = {}
    printed = ""
    for number, cell in enumerate(cells):
        source = "".join(cell["source"])
        for found, shorter in SHORTER_CELLS.items():
            source = source.replace(found, shorter)
        exec(compile(source, f"docs/python.ipynb, code cell {number}", "exec"), names)
        found = capsys.readouterr().out
        shown = "".join("".join(output["text"]) for output in cell["outputs"])
        # the figures depend on the machine and on the length of the text, the lines do not
        assert len(found.splitlines()) == len(shown.splitlines()) or "generate" in "".join(cell["source"])
        printed += found
    figures = dict(re.findall(r"^(dense|SparseGPT|rotated, SparseGPT) +([\d.]+)$", printed, re.MULTILINE))
    assert float(figures["dense"]) < float(figures["rotated, SparseGPT"]) < float(figures["SparseGPT"])


def test_the_notebook_shows_what_it_printed_and_takes_public_names() -> None:
    notebook = json.loads((ROOT / "docs/python.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        code = "".join(cell["source"])
        assert cell["execution_count"] == number and bool(cell["outputs"]) == ("print(" in code), code
        # neither progress nor a path of the machine that ran it
        assert all(output.get("name") == "stdout" for output in cell["outputs"])
        assert not re.search("/(tmp|home|work|root)/", json.dumps(cell["outputs"]))
        assert "from drot." not in code and "import drot." not in code
        names = re.findall(r"^from drot import (.*)", code, re.MULTILINE)
        named = {name for line in names for name in line.split(", ")} | set(
            re.findall(r"\bdrot\.(\w+)", code)
        )
        assert named <= set(drot.__all__)


def test_the_messages_that_the_page_quotes_exist() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^(?:\| |- \*\*)`([^`]+)`", page, flags=re.MULTILINE)
    assert len(messages) > 6
    sources = [
        *(ROOT / "drot").rglob("*.py"),
        ROOT / "setup.py",
        ROOT / "CMakeLists.txt",
        *(ROOT / "cmake").glob("*"),
    ]
    code = "\n".join(file.read_text(encoding="utf-8") for file in sources)
    code = re.sub(r'"\s+f?"', "", code)  # the parts of a message over several lines
    for message in messages:
        # drot/ops/extension.py puts its four reasons behind the same words
        for part in message.removeprefix("drot's native extension ").split("…"):
            assert part.strip() in code, message


def test_the_reference_has_every_public_name() -> None:
    pages = (ROOT / f"docs/reference/{name}.md" for name in ("python", "recipes", "ops"))
    page = "\n".join(file.read_text(encoding="utf-8") for file in pages)
    documented = re.findall(r"^::: (\S+)\.(\w+)$", page, flags=re.MULTILINE)
    assert all(hasattr(importlib.import_module(module), name) for module, name in documented)
    names = {name for _, name in documented}
    python = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^::: \S+\.(\w+)$", python, flags=re.MULTILINE)) <= set(drot.__all__)
    assert {name for name in drot.__all__ if name not in ("__version__", "ops")} <= names
    assert {
        name for name in dir(drot.ops) if callable(getattr(drot.ops, name)) and not name.endswith("_ref")
    } <= names


def options_of(command) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def test_options_in_the_text_exist() -> None:
    import typer.main

    group = typer.main.get_command(cli.app)
    known = {"--help", "--install-completion", "--show-completion", *options_of(group)}
    for name in COMMANDS:
        known |= options_of(imported(name))
    foreign = {
        "--inplace",
        "--no-build-isolation",
        "--no-deps",
        "--tag",
        "--gpus",
        "--volume",
        "--publish",
        "--user",
        "--env",
        "--csv",
        "--llama-cpp",
        "--only",
        "--eval",
        "--seed",
        "--ranks",
        "--kills",
        "--family",
        "--without",
        "--minutes",
        "--nnodes",
        "--nproc-per-node",
        "--rdzv-backend",
        "--rdzv-endpoint",
        "--offload-group-size",
        "--cpu-offload-gb",
        "--disable-cuda-graph",
        "--enable-expert-parallel",
        "--enforce-eager",
        "--max-model-len",
        "--model-path",
        "--load-format",
        "--host-memory",
        "--disk",
        "--adapters",
    }  # setup.py, pip, docker, benchmarks, tests, torchrun, vLLM, SGLang
    for page in ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]:
        text = (ROOT / page).read_text(encoding="utf-8")
        found = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text))
        assert found <= known | foreign, f"{page}: {found - known - foreign}"


def test_links_between_pages_and_files_exist() -> None:
    for page in [
        "README.md",
        "CONTRIBUTING.md",
        *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
    ]:
        for target in re.findall(
            r"\]\((?!https?:|#|mailto:)([^)#]+)", (ROOT / page).read_text(encoding="utf-8")
        ):
            assert os.path.exists((ROOT / page).parent / target), f"{page}: {target}"


def test_the_page_of_figures_shows_the_committed_rows() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "figures.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def table_of_families() -> str:
    lines = ["| `model_type` | models | rotations | fused modules |", "|---|---|---|---|"]
    for model_type, family in FAMILIES.items():
        rotations = [rotation.upper() for rotation in ("r1", "r2", "r3") if family.takes(rotation)]
        fused = [
            f"`{linears[0].path.rpartition('.')[2]}`: {', '.join(linear.name for linear in linears)}"
            for linears in by_module(family.linears)
            if len(linears) > 1
        ]
        cells = (f"`{model_type}`", family.models, ", ".join(rotations), "; ".join(fused))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_page_of_families_shows_the_declarations() -> None:
    page = (ROOT / "docs/architectures.md").read_text(encoding="utf-8")
    shown = re.search(r"<!-- families -->\n(.*?)\n<!-- end -->", page, re.DOTALL)
    assert shown is not None and shown[1] == table_of_families(), f"write this:\n{table_of_families()}"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_supported_models_are_those_of_the_declarations(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    line = re.search(r"^Supported models: (.*?)\.\s", text, re.MULTILINE | re.DOTALL)
    assert line is not None
    named = re.split(r", | and ", line[1].replace("\n", " "))
    assert named == ", ".join(family.models for family in FAMILIES.values()).split(", ")


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """The lines of a page that are neither code, an equation, a table, an image nor a drawn frame."""
    fenced = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        if not fenced and not line.lstrip().startswith(("|", "$$", "![", "```")):
            yield number, line


@pytest.mark.parametrize(
    ("engine", "own", "plugin"),
    [("vLLM", vllm.SERVED_FAMILIES, vllm), ("SGLang", sglang.OWN_FAMILIES, sglang)],
)
def test_the_families_in_an_engine_are_those_of_its_plugin(
    engine: str, own: Iterable[str], plugin: Any
) -> None:
    page = (ROOT / "docs/deploy.md").read_text()
    section = page.split(f"\n## In {engine}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^    \| \w+'s? model[^|]*\| (.*) \|$", section, re.MULTILINE)
    found = [re.findall(r"`(\w+)`", names) for names in rows]
    assert found == [list(own), list(plugin.FAMILIES_OF_TRANSFORMERS), list(plugin.MIXTURES)]
    count = sum(map(len, found))
    assert f"- **Families.** {count}, packed or dense" in section
    assert f"drot's plugin](#in-{engine.lower()}) | checkpoints of {count} families" in page


def test_lines_of_prose_have_at_most_110_columns() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    lines = ((page, number, len(line)) for page in pages for number, line in prose(page))
    assert not [f"{page.name}:{number}: {width} columns" for page, number, width in lines if width > 110]
