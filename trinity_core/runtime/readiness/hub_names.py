"""Whether a model or data set that is named, not given as a path, can be had from the Hugging Face hub or its cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from trinity_core.runtime.readiness.obstacle import Obstacle

ANSWER_SECONDS = 2.0
"""For the hub to say whether a name exists."""


def hub_obstacle(key: str, name: str, kind: Literal["model", "dataset"]) -> Obstacle | None:
    """Why the hub's model or data set of that name cannot be had; None if it can, or is in the cache."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        HTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    what = "data set" if kind == "dataset" else "model"
    here = f"there is no folder {name} here either; check the name, or give the path of a local folder."
    if _is_cached(name, kind):
        return None
    try:
        api = HfApi()
        if kind == "model":
            api.model_info(name, timeout=ANSWER_SECONDS)
        else:
            api.dataset_info(name, timeout=ANSWER_SECONDS)
    except GatedRepoError:
        return Obstacle(key, name, f"the hub gives the {what} only to users who accept its terms; set HF_TOKEN.")
    except RepositoryNotFoundError:
        return Obstacle(key, name, f"the hub has no {what} of this name that you may read (HF_TOKEN), and {here}")
    except HFValidationError as error:
        return Obstacle(key, name, f"is neither a folder nor a name on the hub: {error}.")
    except OfflineModeIsEnabled:
        return Obstacle(key, name, f"the {what} is not in the cache, and HF_HUB_OFFLINE is set; {here}")
    except (HTTPError, OSError) as error:
        why = (str(error) or type(error).__name__).splitlines()[0][:200]
        return Obstacle(key, name, f"the {what} is not in the cache, and the hub does not answer ({why}); {here}", True)
    return None


def _is_cached(name: str, kind: Literal["model", "dataset"]) -> bool:
    """Whether files of it were downloaded. A data set is kept as it was prepared, in a folder of its own."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE, f"{kind}s--{name.replace('/', '--')}", "snapshots")
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets"))
    folders = [folder, prepared / name.replace("/", "___")] if kind == "dataset" else [folder]
    return any(each.is_dir() and any(each.iterdir()) for each in folders)
