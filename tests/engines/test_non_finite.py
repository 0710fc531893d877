"""NaN on one of two ranks, by DDP and FSDP2: both stop at the same step, or leave out the same one."""

import json
import re

import pytest
from engines.non_finite_ranks import CASES, ENGINES
from processes import run_on


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_on(2, "engines/non_finite_ranks.py", folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("engine", ENGINES)
def test_all_ranks_stop_together_and_name_the_one(ranks, engine):
    first, second = (rank[f"{engine} stop"] for rank in ranks)
    assert first["sharded"] == (engine == "fsdp2")
    assert first["message"] == second["message"] and first["step"] == second["step"] <= 3
    assert re.match(r"In step 2 on ranks 1 the loss(, the gradient norm)? ", first["message"]), first["message"]
    assert len(re.search(r"as the trainer holds it: ([\d, ]+)\.", first["message"])[1].split(", ")) == 4
    assert first["finite"] == ((engine, "stop", "adamw_torch_fused") in CASES)


@pytest.mark.parametrize("engine", ENGINES)
def test_all_ranks_leave_out_the_step(ranks, engine):
    for rank, outcome in enumerate(rank[f"{engine} skip_step"] for rank in ranks):
        assert not outcome["message"] and outcome["step"] == 4 and outcome["finite"]
        assert outcome["skipped"] == 1 and len(outcome["warnings"]) == (rank == 0)
