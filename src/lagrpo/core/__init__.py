"""The mathematics of group-relative policy optimization: pure functions of tensors and floats, torch only.

advantages   rewards of a group -> an advantage per completion          objectives   the surrogates, per token
ratios       pi/alpha per token, per sequence, length-normalized        divergences  k1 k2 k3, exact KL, TV, chi2, ESS
reductions   completion lengths -> a weight per completion              estimators   pass@k and intervals
reinforce    masks, weights, regularizers (REC, RED, OPMD)          bounds       Theorem 1, Eq. 4, the exact identity
pieces       all of these by name, for recipes                      dynamics     success amplification p_n = h(p_{n-1})
loss         the loss of a micro-batch from pieces, with diagnostics that add up
extended     exp and products in which 0 * inf = 0, for ratios beyond float32

Token quantities are flat [T] tensors with the index of the completion each token belongs to; there is no padding.
"""
