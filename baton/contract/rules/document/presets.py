"""Rules that every training has: they tell what is almost certainly wrong, and change nothing.

The worker's agent evaluates them, on what the training reports (at most five times a second) and every ten seconds.
A document switches them off by `presets: off`, or each by its name.
"""

from __future__ import annotations

DOCUMENT = """\
# Each only tells. To act on one, copy its condition into a rule of your own, with another name.
# A preset tells three times at most in an attempt, and once in each attempt after a job's tenth.

metrics:
  # Known to the agent alone. Where it is not time that counts, it is 0.
  step.age: {kind: duration}    # since a new step; not before the first, behind the last, nor while phase.age counts
  phase.age: {kind: duration}   # since anything moved in a phase between steps, or a checkpoint began to be stored
  still: {kind: duration}       # since anything moved at all
  step.gap: {kind: duration}    # between the reports of the newest two steps: many loops do not report each
  step.usual: {kind: duration}  # median of the newest 50 gaps; not known before there are 20
  # Levels are medians of 20 reports each. Not known before there are 16 of them.
  loss.level: {}                # the lowest of the newest four: what is over within 80 reports is not in it
  loss.before: {}               # the level eight before the newest
  loss.jump: {}                 # by how much it went up from there, in usual changes from one level to the next
  loss.lost: {}                 # how much of the way from the worst to the best level is lost again, as a share
  checkpoints.missed: {}        # checkpoints that the script deleted before the agent could take them over

rules:
  # One NaN is one too many: from here on the weights are usually lost. The norm of the gradients is left alone,
  # because mixed precision makes it infinite now and then, and skips that step.
  - name: preset-nonfinite
    when: not isfinite(coalesce(loss, 0)) or not isfinite(coalesce(eval.loss, 0))
    cooldown: 10m
    clear: isfinite(coalesce(loss, 0)) and isfinite(coalesce(eval.loss, 0))
    max_fires: 3
    severity: error
    do: {alert: "the loss is {loss} (that of an evaluation: {eval.loss})"}

  # A third of what was learnt is lost, suddenly, and for longer than a spike lasts. Restarts of the learning rate, new
  # data and noise lose less, or come back sooner; a loss that wanders or swings by nature (random walks, two networks
  # against each other) makes no jump of twenty usual changes within 160 reports: 15 were the most in trials, and 25 the
  # least of those that diverged. What is lost slowly is not told from such, and not seen.
  - name: preset-divergence
    when: loss.lost > 0.33 and loss.jump > 20
    cooldown: 1h
    clear: loss.lost < 0.2
    max_fires: 3
    severity: error
    do: {alert: "the loss went up from {loss.before:.4g} to {loss.level:.4g} and stays there"}

  # Twenty times as long as usual, and never less than ten minutes: a slow step, a garbage collection or a cache that is
  # filled again are none. An hour where the usual time is not known yet, because the first steps compile. Twice as long
  # as the longest pause so far, since an evaluation of which nobody tells may come again; two hours where there was
  # none yet, since a script may report once an epoch. What goes on between steps, and says so (`session.phase`), may
  # stand still for two hours.
  - name: preset-stuck
    when: >-
      step.age > 10m and step.age > 20 * coalesce(step.usual, 3m) and step.age > 2 * coalesce(best(step.gap, max), 1h)
      or phase.age > 2h
    cooldown: 1h
    clear: step.age < 10m and phase.age < 2h
    max_fires: 3
    severity: error
    do: {alert: "no step for {still}, usual {step.usual}"}

  # More than half of ten minutes went by waiting for batches: the GPU could do twice as much. Caches that are filled in
  # the first epoch, and single slow files, do not last ten minutes.
  - name: preset-starved
    when: mean(data.wait, 10m) > 0.5 * mean(step.time, 10m)
    cooldown: 1h
    clear: mean(data.wait, 10m) < 0.3 * mean(step.time, 10m)
    max_fires: 3
    do: {alert: "more than half of the time goes by waiting for data: {data.wait} of a step's {step.time}"}

  # No GPU of the machine was as busy as 5 % in any look of 15 minutes, though the training reports steps, or has used
  # one before. Loading, downloading and evaluating do not take that long without a moment of work.
  - name: preset-gpu-idle
    when: max(gpu.util, 15m) < 5 and (count(step.time) > 0 or coalesce(best(gpu.util), 0) >= 5)
    cooldown: 1h
    max_fires: 3
    do: {alert: "no GPU has done anything for 15 minutes"}

  # A script that knows nothing of Baton deletes its checkpoints before they can be stored. The first of an attempt may
  # go by; a second one says that an interruption would cost more than it should, perhaps everything.
  - name: preset-rotation
    when: checkpoints.missed > 1
    cooldown: 1h
    clear: checkpoints.missed < 2
    max_fires: 3
    severity: error
    do: {alert: "the script has deleted {checkpoints.missed:.0f} checkpoints before they could be stored"}
"""
"""All presets, as a document of the language."""

NAMES = (
    "preset-nonfinite",
    "preset-divergence",
    "preset-stuck",
    "preset-starved",
    "preset-gpu-idle",
    "preset-rotation",
)
"""Which no other rule may have."""
