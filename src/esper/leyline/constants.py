"""Every default of the system, once. Nothing else repeats these values."""

# --- the learner ---------------------------------------------------------------------------
DEFAULT_LSTM_HIDDEN_DIM = 128  # an order of magnitude more than the features of three slots need
DEFAULT_LSTM_LAYERS = 1  # a second layer doubles the time of an update
DEFAULT_GAMMA = 0.995  # the last of 25 epochs still counts 88 %
DEFAULT_GAE_LAMBDA = 0.97  # rewards follow a decision by several epochs, so little bias is wanted
DEFAULT_CLIP_RATIO = 0.2  # Schulman et al. 2017, table 3
DEFAULT_VALUE_CLIP = 1.0  # in units of the running return scale, so apart from the policy's clip
DEFAULT_VALUE_COEF = 0.5  # the usual weight of a value loss with a shared trunk
DEFAULT_VALUE_WEIGHT_DECAY = 1e-4  # on the value head only
DEFAULT_ENTROPY_COEF = 0.05  # divided among the heads: 0.0125 for each of four
DEFAULT_ENTROPY_TARGET = 1.0  # share of the maximum entropy: the bonus is always on
DEFAULT_PPO_EPOCHS = 4  # with a single epoch every ratio is 1 and clipping has no effect
DEFAULT_MINIBATCHES = 1  # rollouts are small and noisy
DEFAULT_ACCUMULATION_STEPS = 1  # micro-batches of a minibatch; more save memory
HEAD_COUNT_FLOOR = 0.05  # of all steps: a head that was relevant less often is averaged over these
RETURN_SCALE_DECAY = 0.95  # per update: the scale follows the returns within about 20 updates
MIN_RETURN_SCALE = 1e-2  # returns of almost zero must not enlarge the value head without bound
# |ratio - 1| between the stored log-probabilities of a rollout and recomputed ones, by precision.
STORED_LOG_PROB_TOLERANCE = 1e-4  # float32; measured 4.8e-7
STORED_LOG_PROB_TOLERANCE_TF32 = 2e-2  # TF32 has 10 mantissa bits
STORED_LOG_PROB_TOLERANCE_BF16 = 1e-1  # bf16 has 7 mantissa bits
DEFAULT_LEARNING_RATE = 3e-4  # Adam with PPO
DEFAULT_ADAM_EPSILON = (
    1e-5  # larger than Adam's 1e-8, so that tiny gradients of rare heads stay small
)
DEFAULT_MAX_GRAD_NORM = 0.5  # large gradients come from rare heads and from new returns
DEFAULT_TARGET_KL: float | None = 0.02  # an update ends early beyond it; None disables this
KL_EARLY_STOP_MULTIPLIER = 1.5  # the estimate is noisy: stop only clearly above the target
RATIO_EXPLOSION = 5.0  # far outside the clip range: the policy has moved too much
RATIO_COLLAPSE = 0.1  # likewise, downwards
LOG_RATIO_CLAMP = 20.0  # e^20 is finite in float32 and bf16; no useful ratio is near it
MASK_VALUE = -1e4  # finite, also in half precision; exp of it is 0

# --- the world -----------------------------------------------------------------------------
DEFAULT_EPISODE_LENGTH = 25
DEFAULT_RENT = 2.0  # points of score per 100 % of the host's parameters, over a whole episode

# --- the reward ----------------------------------------------------------------------------
SCORED_EPOCHS = 3  # the score of an episode is the mean over its last epochs
RENT_LEVELS = (0.0, DEFAULT_RENT, 5.0)  # that evaluations report
MIN_REWARD_SCALE = 3.0  # points: where little can be gained, noise must not fill the reward
DEFAULT_CAUTION = 1.0  # a point that is lost counts as much as one that is gained
DEFAULT_INTERVENTION_COST = 0.02  # points for each decision other than WAIT; more misranks them
DEFAULT_ROLLBACK_PENALTY = 20.0  # points: the rent of 4 x the host, even at 5 points for 1 x
DEFAULT_SHAPING_WEIGHT = 1.0
SHAPING_SHARE = 0.5  # of what keeping the network as it is would still add to the score
GERMINATED_POTENTIAL = 0.05  # points for each seed; the way to FOSSILIZED leads uphill, and
TRAINING_POTENTIAL = 0.1  # what a stage is worth makes up for the decisions that led there
BLENDING_POTENTIAL = 0.2
HOLDING_POTENTIAL = 0.25
FOSSILIZED_POTENTIAL = 0.3

# --- what shadows and audits go by; losses in units of guessing --------------------------------
CERTAIN = 3.0  # standard errors of a gain above nothing, since the best of many is looked at
UNLEARNED = 0.1  # training loss above which there is still much to learn
BY_HEART = 0.15  # validation minus training loss above which samples are learned by heart
TRAINING_PASSES = 3  # forward passes that a training step costs

# --- the body ------------------------------------------------------------------------------
BACKENDS = ("auto", "fused", "chip")  # that compute a population
DEFAULT_SLOT_COUNT = 3
DEFAULT_BLEND_TEMPO = 3  # epochs for alpha to go 0 -> 1
DEFAULT_PRUNE_TEMPO = 2  # epochs for alpha to go 1 -> 0
DEFAULT_EMBARGO = 2  # epochs a slot rests after a removal
DEFAULT_MIN_TRAINING_EPOCHS = 1
DEFAULT_MIN_HOLDING_EPOCHS = 1
DEFAULT_MIN_GRADIENT = 1e-9  # a seed below this is dead, not converged
DEFAULT_MIN_CONTRIBUTION = 0.0  # a seed that measurably harms is not made permanent
DEFAULT_MAX_LOSS_RISE = 0.5  # relative rise of the training loss over one epoch
GATE_LEARNING_RATE_SCALE = 10.0  # a scalar gate at the base rate gains half of what it could
