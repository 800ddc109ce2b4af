"""Captions of the report's sections, by their titles."""

from __future__ import annotations

CHOOSE = "Policies to choose from"
COMPLETIONS = "Sample completions"

CAPTIONS = {
    CHOOSE: (
        "Set limits on what you would accept. Policies that miss them fade in the figure and in "
        "the table, and the card below describes the best one left. Click a point or a name to see "
        "its card."
    ),
    COMPLETIONS: (
        "All policies have the same test prompts, drawn at random. One completion per prompt, "
        "sampled at the temperature of the evaluation, with its scores."
    ),
    "Warnings": "What to check before you trust the result, and what would help.",
    "Findings": "",
    "Limits of the data": "",
    "Front uncertainty": (
        "Attainment surfaces: the front recomputed 200 times, resampling each mean. Each line "
        "bounds what that share of the recomputed fronts attains in these two objectives. Where "
        "the lines are close together, the front is well known. Grey dots: the means."
    ),
    "Which parameters mattered": (
        "Share of the variance between trials that involves a parameter, alone or together with "
        "others, over the whole search space (total Sobol index). Shares of parameters that act "
        "together overlap; the rest is noise. Bars: 95 % intervals. Strong: clear effect. Medium: "
        "unclear. Pale: no detectable effect."
    ),
    "Parameters and objectives": (
        "One line per configuration, coloured by normalization mode. Drag along an axis to keep "
        "the lines that pass there; click the axis to clear."
    ),
    "Each parameter against each objective": (
        "One point per configuration; the other parameters vary too. Large points are on the front."
    ),
    "Progress": (
        "Hypervolume of the front after each trial, against fixed references: by trials, by time "
        "and by compute. It falls where a replicate corrects a lucky first trial."
    ),
    "Training curves": (
        "Running means over five steps. Strong lines: trials on the front. A dead group has equal "
        "rewards throughout, so the policy learns nothing from it."
    ),
    "Validation scores during training": (
        "Strong lines: trials on the front. A cross: stopped early."
    ),
    "Share of the training signal": (
        "How much each reward contributed: |weight * standard deviation|, divided by the sum over "
        "rewards, averaged over the steps. A large front is shown in part."
    ),
    "Population": (
        "Parameters of each member during training, coloured by mode. Strong lines: on the front. "
        "A dot: the member copied the weights and parameters of another one. Tables show the "
        "initial values; schedule.json in a member's directory lists the values that its policy "
        "was trained with."
    ),
    "Origins of the front": (
        "How much final policies, earlier checkpoints and merges each contribute. Hypervolume: of "
        "this row and the rows above. Share: what this row adds to the total. Cost: of all trials "
        "of this kind, on the front or not."
    ),
    "Timeline": "",
    "Failures": "Trials that ended without a result. The front and the search ignore them.",
    "Node losses and retries": (
        "Lost nodes and failed attempts. Each trial resumed from its latest checkpoint. A lost "
        "node does not count as a failure of its trials."
    ),
    "All trials": "★: on the front. Click a heading to sort.",
    "About this sweep": "",
}

READING_THE_FIGURE = (
    "Figure: right and up is better. Filled: two or more seeds. Hollow: one seed, provisional. "
    "Faded: dominated, or beyond your limits. Small cross: violates a constraint. Dotted line: a "
    "constraint. Bars: one standard error. A policy on the front can lie below the line of a "
    "panel, because it is better in another objective."
)
READING_THE_TABLE = (
    "Table: means over seeds on test prompts ± one standard error. With one seed the noise of "
    "training is unknown: the policy is provisional, and its error is at least the spread between "
    "seeds elsewhere in the sweep. Card: 95 % intervals. P(front): probability of being on the "
    "front, given means and standard errors."
)
