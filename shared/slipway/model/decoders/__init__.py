"""How a decoder computes, as its settings and the defaults of its class say: sizes, windows of attention, rotary embedding."""
