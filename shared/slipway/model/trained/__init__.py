"""The model that an adapter was trained on, where its base is stored as a model of another class."""
