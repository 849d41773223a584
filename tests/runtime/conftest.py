"""Makes the helpers beside the runtime tests importable, for pytest as for the launched workers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
