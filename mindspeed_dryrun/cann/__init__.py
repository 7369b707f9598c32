"""The engine below MindSpore: a real CANN where there is one, else the stand-in that is generated here.

`lacks` finds what MindSpore's Ascend plugin asks for, `machine_code` and `writer` make a library of it, `stand_in`
lays the folder out and keeps it, `real` finds an installed CANN, `choice` decides. `pause` stops MindSpore's threads from
spinning, on both.
"""

from mindspeed_dryrun.cann.choice import Engine, choose_engine

__all__ = ["Engine", "choose_engine"]
