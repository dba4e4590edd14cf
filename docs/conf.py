"""Settings of the site: Sphinx, Markdown by MyST, the furo theme, and nothing from the network."""

import tomllib
from pathlib import Path
from typing import Any

import tallyroll

project = "Tallyroll"
author = "the authors of Tallyroll"
release = tallyroll.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
myst_enable_extensions = ["html_image"]  # pictures for light and for dark mode

html_theme = "furo"
html_title = f"Tallyroll {release}"
html_show_search_summary = False  # fetches a summary, which a page opened from disk cannot
html_copy_source = False
html_show_copyright = False
html_use_index = html_domain_indices = False  # too wide for a phone, which has the search
html_theme_options = {  # lines of 96 characters fit the column
    "light_css_variables": {"code-font-size": "0.75rem"},
}
_settings = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))
if _repository := _settings["project"].get("urls", {}).get("Repository"):
    html_theme_options |= {
        "source_repository": _repository,
        "source_branch": "main",
        "source_directory": "docs/",
    }
copybutton_exclude = ".linenos, .gp, .go"  # copy neither the prompt of a command nor its output
copybutton_selector = "div:not(.highlight-text, .highlight-diff) > div.highlight > pre"

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_rtype = False  # or the words before a colon in "Returns" are linked as a type
nitpick_ignore = [("py:exc", "As iterating does.")]
nitpick_ignore_regex = [  # types of other libraries, type aliases, and classes of private modules
    ("py:class", r"(?!tallyroll\.)[\w.]+"),
    ("py:class", r"tallyroll\.\w+\.[a-z]\w*\..+"),
]

SEARCH_WORDS = {
    "api": ("api reference",),
    "checkpoints": ("resume", "restart", "checkpoint", "preemption"),
    "choosing": ("splits", "filter", "views"),
    "coming_from": ("CleanRL", "Stable-Baselines3", "SB3", "migration"),
    "command_line": ("CLI", "shell"),
    "devices": ("GPU", "CUDA", "device"),
    "exchange": ("Minari", "LeRobot", "D4RL", "RLDS", "Hugging Face", "export", "import"),
    "hindsight": ("HER", "hindsight experience replay", "goals"),
    "logging": ("TensorBoard", "W&B", "wandb"),
    "look": ("viewer", "notebook", "plot", "video"),
    "n_step": ("n-step", "n_step", "multi-step returns"),
    "object_stores": ("S3", "hub", "cloud"),
    "off_policy": ("DQN", "SAC", "TD3", "off-policy"),
    "on_policy": ("PPO", "A2C", "GAE", "rollout", "on-policy"),
    "overlays": ("relabel", "overlay", "mutable"),
    "own_loop": ("Recorder", "training loop"),
    "packing": ("compression", "packed"),
    "pixels": ("frame stack", "frame stacking", "Atari", "pixels", "images"),
    "prioritized": ("PER", "prioritized experience replay", "prioritised"),
    "recurrent": ("LSTM", "GRU", "RNN", "burn-in"),
    "reports": ("scientific paper", "learning curves", "confidence intervals"),
    "resets": ("domain randomization", "curriculum"),
    "several_policies": ("self-play", "multi-agent", "MARL"),
    "shards": ("Slurm", "job array", "Kubernetes"),
    "sound": ("repair", "corrupt"),
    "speed": ("benchmark", "performance"),
    "start": ("install", "quickstart", "tutorial"),
    "storage": ("replay buffer", "HDF5", "Zarr", "ring"),
    "systems": ("environments", "MuJoCo", "Brax", "EnvPool", "PettingZoo"),
    "training_from": ("offline", "offline RL", "DataLoader", "behaviour cloning"),
    "truth": ("time limit", "truncation", "bootstrap"),
    "tutorial_dataset": ("publish", "upload", "train-test split"),
    "tutorial_dqn_atari": ("Breakout", "replay memory", "ALE"),
    "tutorial_paper": ("LaTeX", "reproducibility", "experiment", "proof"),
    "tutorial_ppo": ("own environment", "custom environment", "plain PyTorch"),
    "workers": ("parallel", "subprocess", "vectorized"),
}
"""Index entries of each page: words of the field with which people search, but which the text may
lack. The search of the site ranks pages with a matching entry first."""

_of_attributes: dict[str, list[str]] = {}


def setup(app: Any) -> None:
    """Add index entries, and keep napoleon from parsing words of attributes as types."""
    app.connect("autodoc-process-docstring", _remember, priority=400)
    app.connect("autodoc-process-docstring", _restore, priority=600)
    app.connect("source-read", _add_search_words)


def _add_search_words(app: Any, page: str, source: list[str]) -> None:
    """Add index entries below the title. In the file, GitHub would show them as code."""
    if words := SEARCH_WORDS.get(page):
        title, _, text = source[0].partition("\n")
        entries = ", ".join(f"! {word}" for word in words)
        source[0] = f"{title}\n\n```{{index}} {entries}\n```\n{text}"


def _is_plain(what: str, lines: list[str]) -> bool:
    return what in ("attribute", "property") and not any(line.endswith(":") for line in lines)


def _remember(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    if _is_plain(what, lines):
        _of_attributes[name] = list(lines)


def _restore(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = _of_attributes.get(name, lines)
