"""Other projects' MoE layers and models behind one small interface, each run in a virtual environment of its own."""
