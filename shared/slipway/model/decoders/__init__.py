"""How a decoder computes, as its settings and the defaults of its class say: sizes, windows of attention, rotary embedding.

Its layers say in which table a class is: ``recurrent`` if some are recurrent or convolutional, otherwise ``mixtures`` if it has experts and
``dense`` if not. ``gemma`` has the whole family. Formats say in their own tables which of these classes they write, and how.
"""
