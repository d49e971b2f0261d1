"""A recommender of films, on MovieLens-100k (Harper and Konstan, ACM TiiS 5(4), 2015).

The ratings are read where ``pip install --no-deps recbole==1.2.1`` has put them, or in a file of that format.

- Each rating counts as a choice of the film. The last one of each user is left out of training, and the model ranks it
  among all films that the user has not rated before: recall@10 is how often it is among the first ten, and NDCG@10 also
  counts its rank.
- The loss is that of Rendle et al., "BPR: Bayesian personalized ranking from implicit feedback", UAI 2009: a film
  that was chosen has a higher score than one that is drawn at random.
- The same figures are printed for the ranking by popularity, which is the same for all users.
"""

import csv
import importlib.util
from pathlib import Path

import torch
from factorisation import FactorisationMachine
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paramserver import Task

BEST = 10


def find_ratings() -> Path:
    """Return the file of ratings in the package recbole, which is not imported."""
    package = importlib.util.find_spec("recbole")
    if package is None or package.origin is None:
        raise FileNotFoundError(
            "MovieLens-100k is not here: python -m pip install --no-deps recbole==1.2.1, which has it, or set "
            "task_args.ratings to a file with the columns user_id, item_id, rating and timestamp"
        )
    return Path(package.origin).parent / "dataset_example" / "ml-100k" / "ml-100k.inter"


def read_ratings(path):
    """Return users and films, numbered from 0, in the order of time."""
    with Path(path).open(newline="") as file:
        lines = list(csv.DictReader(file, delimiter="\t"))
    columns = {name.partition(":")[0]: name for name in lines[0]}  # such as user_id:token
    lines.sort(key=lambda line: float(line[columns["timestamp"]]))
    numbered = []
    for name in ("user_id", "item_id"):
        ids = [line[columns[name]] for line in lines]
        number_of = {one: number for number, one in enumerate(dict.fromkeys(ids))}
        numbered.append(torch.tensor([number_of[one] for one in ids]))
    return numbered


def recall_and_ndcg(scores, wanted):
    """Return recall@10 and NDCG@10 of one wanted item for each row of scores: the means over the rows."""
    ranks = (scores > scores.gather(1, wanted[:, None])).sum(1)
    is_found = (ranks < BEST).float()
    return is_found.mean(), (is_found / torch.log2(ranks + 2.0)).mean()


class MovieLens(Task):
    """Ranks films for users.

    Args:
        ratings: a file of ratings; by default that of the package recbole.
        width: factors of the model.
        lr: of Adagrad.
    """

    def __init__(self, ratings: str | None = None, width: int = 16, lr: float = 0.1) -> None:
        self.users, self.films = read_ratings(ratings or find_ratings())
        self.width, self.lr = width, lr
        num_users, num_films = int(self.users.max()) + 1, int(self.films.max()) + 1
        last = {user: place for place, user in enumerate(self.users.tolist())}
        self.left_out = torch.tensor([last[user] for user in range(num_users)])
        is_trained = torch.ones(len(self.users), dtype=torch.bool)
        is_trained[self.left_out] = False
        self.trained = TensorDataset(self.users[is_trained], self.films[is_trained])
        self.is_rated = torch.zeros(num_users, num_films, dtype=torch.bool)
        self.is_rated[self.trained.tensors] = True
        self.popularity = self.is_rated.sum(0).float()

    def build_model(self):
        return FactorisationMachine(*self.is_rated.shape, self.width)

    def build_optimizer(self, model):
        return torch.optim.Adagrad(model.parameters(), self.lr)

    def train_source(self, partition):
        return self.trained

    def validation_source(self, partition):
        return TensorDataset(self.users[self.left_out], self.films[self.left_out])

    def training_step(self, model, batch, batch_idx):
        users, films = batch
        others = torch.randint(self.is_rated.shape[1], films.shape)
        # A film that the user has rated is no wrong answer; it gets no weight.
        weight = (~self.is_rated[users, others]).float()
        return (F.softplus(model(users, others) - model(users, films)) * weight).sum() / weight.sum()

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        users, films = batch
        num_films = self.is_rated.shape[1]
        scores = model(users.repeat_interleave(num_films), torch.arange(num_films).repeat(len(users)))
        rated = self.is_rated[users]
        recall, ndcg = recall_and_ndcg(scores.view(len(users), -1).masked_fill(rated, -torch.inf), films)
        popular = self.popularity.expand(len(users), -1).masked_fill(rated, -torch.inf)
        recall_of_popular, ndcg_of_popular = recall_and_ndcg(popular, films)
        return {
            "recall_10": recall,
            "ndcg_10": ndcg,
            "recall_10_by_popularity": recall_of_popular,
            "ndcg_10_by_popularity": ndcg_of_popular,
        }
