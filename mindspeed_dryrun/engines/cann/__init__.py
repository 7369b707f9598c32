"""CANN below an engine: a real one where it is installed, else the stand-in that is generated here.

`required_symbols` finds what MindSpore's Ascend plugin asks for, `machine_code` and `library_writer` make a library of it,
`stand_in` lays the folder out and keeps it, `real` finds an installed CANN.
"""
