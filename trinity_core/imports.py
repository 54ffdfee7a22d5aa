"""Optional imports of our libraries that cost seconds at start and give a run nothing."""

from __future__ import annotations


def without_sklearn() -> None:
    """Keep transformers from importing scikit-learn, which it does for assisted generation alone (a ROC curve).

    Saves every engine and every trainer worker up to 4.5 s of a core at start
    (`python -X importtime -c "import vllm.config"`).
    It must be called before anything imports the models or the generation of transformers.
    """
    import transformers.utils
    import transformers.utils.import_utils

    def absent() -> bool:
        return False

    transformers.utils.is_sklearn_available = absent
    transformers.utils.import_utils.is_sklearn_available = absent
