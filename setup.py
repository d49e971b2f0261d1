from setuptools import find_packages, setup

# The folder trainers/ is imported as paramserver.trainers. In a checkout find_packages finds it through the link
# paramserver/trainers, which an archive may not have.
setup(
    packages=sorted({*find_packages(include=["paramserver", "paramserver.*"]), "paramserver.trainers"}),
    package_dir={"paramserver.trainers": "trainers"},
)
# The metadata, and the settings of pytest and mypy, are in setup.cfg; those of ruff in ruff.toml.
