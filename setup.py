"""Package metadata. Lower bounds are the versions the test suite was run with."""

import pathlib
import re

import setuptools

ROOT = pathlib.Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "sspjax/__init__.py").read_text())[1]

setuptools.setup(
    name="sspjax",
    version=VERSION,
    description="Search self-play for language-model agents, in JAX",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.11",
    packages=setuptools.find_namespace_packages(
        include=["sspjax", "sspjax.*", "retrieval_index", "retrieval_index.*"]
    ),
    package_data={"": ["*.txt", "*.jsonl", "*.html", "*.css", "*.js"]},
    install_requires=[
        "array_record>=0.8.6",
        "etils[epath]>=1.15.0",
        "flax>=0.12.8",
        "httpx>=0.28.1",
        "jax>=0.10.2",
        "jaxtyping>=0.3.11",
        "ml-collections>=1.1.0",
        "numpy>=2.4.6",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12.8",
        "rich>=15.0.0",
        "safetensors>=0.8.0",
        "scipy>=1.17.1",
        'scann>=1.4.2; sys_platform == "linux"',
        "tensorboardX>=2.6.5",
        "tensorflow-datasets>=4.9.10",
        "tokenizers>=0.23.3",
        "transformers>=5.24.0",
    ],
    extras_require={
        "tpu": ["jax[tpu]>=0.10.2"],
        "cuda": ["jax[cuda13]>=0.10.2"],
        "parity": ["torch>=2.13.0"],
        "bench": ["faiss-cpu", "gguf>=0.19.0", "torch"],
        "serve": ["fastapi>=0.165.0", "uvicorn>=0.54.0"],
        "test": [
            "fastapi>=0.165.0",
            "gguf>=0.19.0",
            "hypothesis>=6.170",
            "pyright[nodejs]>=1.1.414",
            "pytest>=9.2",
            "ruff>=0.17.6",
            "uvicorn>=0.54.0",
        ],
    },
)
