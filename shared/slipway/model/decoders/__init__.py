"""How a decoder computes, as its settings and the defaults of its class say: sizes, windows of attention, rotary embedding.

A format says in a table of its own which classes it writes, and how. ``classes`` has what is said of those that several formats write.
"""
