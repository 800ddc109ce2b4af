"""Colours that pictures and MLflow share.

Six are those of Okabe and Ito, which stay distinct under the common colour-vision deficiencies; two
are Tol's.

Source: Okabe and Ito 2008, Color Universal Design; Tol 2021, Colour Schemes (muted).
"""

INK = "#1c2430"
MODE_COLORS = {
    "gdpo": "#0072b2",
    "grpo": "#d55e00",
    "grpo_no_std": "#009e73",
    "grpo_batch": "#cc79a7",
    "gdpo_no_batch_norm": "#56b4e9",
    "gdpo_no_std": "#e69f00",
    "dvao": "#882255",
    "saw": "#999933",
}
"""Normalization mode -> colour, `#rrggbb`."""
OTHER_COLOR = "#7f7f7f"
"""Colour of a mode that `MODE_COLORS` lacks."""
