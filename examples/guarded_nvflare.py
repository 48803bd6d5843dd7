"""Runs a NumPy job of NVFlare in its simulator, behind the guard of model updates.

    pip install 'fedsynth[nvflare]'
    python examples/guarded_nvflare.py                # guarded_nvflare_client.py
    python examples/guarded_nvflare.py client.py      # another client script, unchanged

Each site's budget suffices for one run of three rounds, so a second run is refused in its first
round. Afterwards, `fedsynth privacy verify guard` checks the report.

NVFlare's simulator ignores a site's `privacy.json`, so the filters are added to the job here. At a
real site, `privacy.json` names them, and the job is not changed at all (docs/guard.md).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

SETTINGS = """\
clip = 3.0
epsilon = 8.0
delta = 1e-5
rounds = 3

[nominal]
weight_mean = 0
"""
SITES, ROUNDS = 2, 3
# The filters of a job need the names of its tasks: "*" matches none.
TASKS = ["train", "validate", "submit_model"]


def run(script: Path, folder: Path, workspace: Path) -> Path:
    """Runs a client script at two sites, behind the guard.

    Args:
        script: the job's client script.
        folder: the guard's folder.
        workspace: the folder of NVFlare's simulation.

    Returns:
        The file of the server's model.
    """
    from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
    from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
    from nvflare.recipe import SimEnv

    from fedsynth.deployment.nvflare_filter import GuardFilter

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "guard.toml").write_text(SETTINGS)
    recipe = NumpyFedAvgRecipe(
        name="guarded",
        model=[[1, 2, 3], [4, 5, 6], [7, 8, 9]],
        min_clients=SITES,
        num_rounds=ROUNDS,
        train_script=str(script),
    )
    recipe.add_client_input_filter(GuardFilter(str(folder.absolute())), tasks=TASKS)
    recipe.add_client_output_filter(GuardFilter(str(folder.absolute())), tasks=TASKS)
    allowed = {"class_allow_list": [*DEFAULT_CLASS_ALLOW_LIST, "fedsynth"]}
    site = {**allowed, "allow_log_streaming": False}
    local = workspace / "guarded" / "local"
    local.mkdir(parents=True, exist_ok=True)
    (local / "resources.json.default").write_text(json.dumps({"format_version": 2, **site}))
    recipe.execute(SimEnv(num_clients=SITES, workspace_root=str(workspace)))
    return workspace / "guarded" / "server" / "simulate_job" / "models" / "server.npy"


if __name__ == "__main__":
    own = Path(__file__).with_name("guarded_nvflare_client.py")
    chosen = Path(sys.argv[1]) if len(sys.argv) > 1 else own
    print("the server's model:", run(chosen, Path("guard"), Path("simulation")))
