"""The folder that an activated shell puts first on PYTHONPATH. Python imports its `sitecustomize` at every start."""
