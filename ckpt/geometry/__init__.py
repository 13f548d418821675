"""Geometry: boxes, layouts, the canonical chunk grid, placement rules, and plans.

Pure functions over integers and NumPy arrays: no torch, no I/O, so a plan for thousands of ranks can be made
and tested in one process. Imports nothing else of ckpt but its errors.

Start reading at `box.Box`, then `grid.canonical_grid` and `catalogue.Catalogue` (what is stored where), then
`holdings.Holdings` (who has what) and `plan.write_plan` / `plan.read_plan` (who does what).
"""

from ckpt.geometry.box import Box
from ckpt.geometry.catalogue import Catalogue, StoredArray, StoredObject, TensorSpec
from ckpt.geometry.exchange import ExchangePlan, Transfer, exchange_plan
from ckpt.geometry.grid import Grid, canonical_grid
from ckpt.geometry.holdings import Holdings
from ckpt.geometry.layout import Coords, Layout
from ckpt.geometry.plan import Link, Plan, Unit, read_plan, write_plan

__all__ = [
    "Box",
    "Catalogue",
    "Coords",
    "ExchangePlan",
    "Grid",
    "Holdings",
    "Layout",
    "Link",
    "Plan",
    "StoredArray",
    "StoredObject",
    "TensorSpec",
    "Transfer",
    "Unit",
    "canonical_grid",
    "exchange_plan",
    "read_plan",
    "write_plan",
]
