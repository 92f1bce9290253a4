"""Models with their authors' names in torch, and as a Flax user writes them.

Each module has `CASES`: name -> the torch module, the Flax module, the shapes of the inputs in
torch's layout (a number stands for so many integers below 11), and from how many axes on an input
has its channels last in Flax.
"""
