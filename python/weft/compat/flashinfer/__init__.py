# SPDX-License-Identifier: Apache-2.0
"""Weft as a back end of FlashInfer's `flashinfer.moe_ep`.

import weft.compat.flashinfer
weft.compat.flashinfer.register()   # then: create_communication(bootstrap, params, "weft"),
                                    # or create_fleet(bootstrap, params, knobs, "weft");
                                    # in FlashInfer's layer the back end "weft_fleet"
"""

import importlib
from types import ModuleType

from weft import NotAvailable

from .communication import Communication
from .fleet import Fleet
from .handles import FleetHandle, RowsHandle

__all__ = ["Communication", "Fleet", "FleetHandle", "RowsHandle", "register"]

# Modules that have had the classes of a plug-in.
_MODULES = ("flashinfer.moe_ep", "flashinfer.moe_ep.core.comm.communication")
_AGREEMENT = "flashinfer.moe_ep.core.comm.fault_tolerance"


def register(name: str = "weft") -> type:
    """Makes FlashInfer's `create_communication` know Weft by this name, and `create_fleet`, if it
    exists. FlashInfer's layer refuses a name that is both, so each is also registered as `name` +
    "_communication" or "_fleet". NotAvailable without a FlashInfer that has such plug-ins. Returns
    the communication class."""
    module = _plug_ins()
    base, result = module.MoEEpCommunication, module.MoEEpDispatchResult
    made = type("WeftCommunication", (Communication, base), {"result_class": result})
    if hasattr(module, "register_fleet"):
        _register_fleet(module, name)
    for each in (f"{name}_communication", name):  # the class keeps the last name
        module.register_communication(each)(made)
    return made


def _register_fleet(module: ModuleType, name: str) -> None:
    results = {"dispatch_class": module.DispatchOutput, "combine_class": module.CombineOutput}
    handles = {
        "handle_class": type("WeftHandle", (FleetHandle, module.Handle), results),
        "rows_handle_class": type("WeftRowsHandle", (RowsHandle, module.Handle), results),
    }
    bases = (Fleet, module.Fleet)
    try:  # how the ranks that are left agree about the others is FlashInfer's
        bases = (Fleet, importlib.import_module(_AGREEMENT).FaultToleranceMixin, module.Fleet)
    except (ImportError, AttributeError):
        pass
    fleet = type("WeftFleet", bases, handles)
    for each in (f"{name}_fleet", name):
        module.register_fleet(each)(fleet)


def _plug_ins() -> ModuleType:
    problem = "it has no register_communication"
    for name in _MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            problem = str(error)
            continue
        if hasattr(module, "register_communication"):
            return module
    raise NotAvailable(f"register: flashinfer.moe_ep has no plug-ins ({problem})", "not available")
