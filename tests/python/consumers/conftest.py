# SPDX-License-Identifier: Apache-2.0
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # dense, loading and the stubs
sys.path.insert(1, str(Path(__file__).parents[1] / "compat"))  # nixl_cases
