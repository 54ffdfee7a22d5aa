"""What a configuration names, opened before anything starts: model folders, data, output folders, the port, the GPUs.

Each module looks at one kind of thing and yields what it finds; `unready` is all of them.
"""

from trinity_core.runtime.readiness.checks import check_opened, load_ready, require_ready, unready
from trinity_core.runtime.readiness.obstacle import Obstacle

__all__ = ["Obstacle", "check_opened", "load_ready", "require_ready", "unready"]
