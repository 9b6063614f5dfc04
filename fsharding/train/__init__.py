"""The train step and what it works on: state, data, resharding of whole states."""
