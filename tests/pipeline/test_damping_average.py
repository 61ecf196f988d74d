"""The average of diag H of which the damping is a share: where it is used, and part of a run's identity."""

import pytest
from runs import interrupted, prune, recipe

from drot.calibration import hessian
from drot.calibration.hessian import damping_unit
from drot.core.errors import UserError
from drot.pruning import solve

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("fields", [{}, {"hessians": "dense"}, {"mode": "none"}], ids=str)
@pytest.mark.parametrize("average", ["mean", "median"])
def test_the_average_reaches_every_factorisation(fields, average, monkeypatch):
    asked = set()

    def noted(diagonal, average):
        asked.add(average)
        return damping_unit(diagonal, average)

    for module in (hessian, solve):
        monkeypatch.setattr(module, "damping_unit", noted)
    prune(chosen=recipe(damping_average=average, solve="admm", **fields))
    assert asked == {average}


def test_a_run_with_another_average_is_not_resumed(tmp_path):
    out, chosen = tmp_path / "out", recipe(damping=0.05)
    interrupted(chosen=chosen, out=out)
    with pytest.raises(UserError, match="pruning.damping_average: median in the unfinished run, mean now"):
        prune(chosen=chosen.replace(damping_average="mean"), out=out, resume=True)
    prune(chosen=chosen.replace(damping_average="median"), out=out, resume=True)
