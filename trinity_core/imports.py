"""Optional imports of our libraries that cost seconds at start and give a run nothing."""

from __future__ import annotations


def lean_transformers() -> None:
    """Keep transformers from importing scikit-learn and SciPy.

    It uses the one for assisted generation alone (a ROC curve), the other for the losses of object detection, and
    imports both with the first model. They cost each engine and trainer worker seconds of a core at start
    (`python -X importtime -c "import transformers.modeling_utils"`). It must be called before anything imports the
    models or the generation of transformers.
    """
    import transformers.utils
    import transformers.utils.import_utils

    def absent() -> bool:
        return False

    transformers.utils.is_sklearn_available = absent
    transformers.utils.is_scipy_available = absent
    transformers.utils.import_utils.is_sklearn_available = absent
    transformers.utils.import_utils.is_scipy_available = absent
