"""Running dvc.yaml: `python -m flows.repro` in the terminal, `python -m flows.reproduce` as a Prefect flow."""
