"""Architectures with recurrent or convolutional layers, with experts or without, by the kind of these layers. Data, and light."""
