"""A study: an experiment as a file. Runs over a grid of settings and seeds, measures of them, claims with verdicts.

study.py    from the file to the report    file.py        what the file says
running.py  the runs that are missing      measures.py    numbers from a run's files
claims.py   which runs a claim compares    statistics.py  intervals and verdicts
report.py   tables and verdicts            curves.py      metrics by batch
"""
