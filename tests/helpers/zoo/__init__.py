"""Models with their authors' names in torch, and as a Flax user writes them.

Each module has `CASES`: name -> (torch module, Flax module, shapes of the inputs in torch's layout;
integers below 11 where a shape is one number, of so many positions).
"""
