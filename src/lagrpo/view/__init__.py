"""`lagrpo view`: a run as one HTML file that needs no network, to look into it in a browser. docs/inspect.md has more.

command.py     write the file, say what is in it      serve.py        the same page on 127.0.0.1, kept up to date
data.py        from runs to what the page holds       sample.py       which completions fit in
rollouts.py    groups, completions, tokens            vocabulary.py   the texts of tokens
evaluations.py  prompts before and after              meanings.py     what each metric is
payload.py     JSON and arrays, packed                page.py         the HTML around them, made of assets/
"""
