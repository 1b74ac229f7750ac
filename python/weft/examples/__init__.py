# SPDX-License-Identifier: Apache-2.0
"""Programs that show Weft at work: `python -m weft.examples.moe_layer`."""
