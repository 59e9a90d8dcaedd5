"""The mathematics of group-relative policy optimization: pure functions of tensors that import torch alone.

recipes      a table; each row names the functions of an objective     kl           KL estimators, exact divergences
losses       surrogates, masks, weights, regularizers, per token       corrections  weights pi_k/alpha
advantages   rewards of a group -> an advantage per completion         reductions   lengths -> weights of completions
ratios       pi/alpha per token, sequence, or length-normalized        bounds       bounds, success amplification
estimators   pass@k and intervals

Token quantities are flat [T], with the index of the completion that each token belongs to; there is no padding. A
suffix gives the shape: _T tokens, _C completions, _G completions of one group.
"""
