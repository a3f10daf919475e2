"""The configuration's YAML files, shipped as the package `nemo_qad.conf`."""
