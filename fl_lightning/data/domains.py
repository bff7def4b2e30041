"""Domains: a partition of clients by the domain of their samples, and image folders that are laid out by domain."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from fl_lightning.core.errors import ConfigError, check_number, one_line
from fl_lightning.core.names import join_names
from fl_lightning.data.assignment import assign_samples, equal_sizes
from fl_lightning.data.custom_data import Samples, existing_path
from fl_lightning.data.datasets import KEY
from fl_lightning.data.files import BadFile, check_exists, files_in, read_text
from fl_lightning.data.image_files import naming_path
from fl_lightning.data.image_folder import ImageFolder, labelled_samples, subfolders
from fl_lightning.data.images import Augment
from fl_lightning.data.partitions import ClientSplits, Partition

if TYPE_CHECKING:
    from fl_lightning.data.loaded_data import LoadedData


class Domains(Partition):
    """Split by domain: each client belongs to one domain, and one domain can be left out to test on.

    The domain of a sample is its client id in the data (`LoadedData.client_train` and `client_test`): a style of
    images, a hospital, an angle. The clients of a domain are named `DOMAIN/0`, `DOMAIN/1` and so on. They are ordered
    by domain.

    `mixing` is λ of Bai, Bagchi and Inouye, "Benchmarking Algorithms for Federated Domain Generalization", ICLR 2024.
    With K clients in all and `K_d` of domain d, a client gets `λ n_d / K` of the `n_d` samples of each domain, and in
    addition `(1 - λ) n_d / K_d` of its own domain. `λ n_d` is rounded to an integer, and the numbers of clients differ
    by at most one sample in each of the two terms. Which samples a client gets is random. With λ = 0, each client has
    one domain. With λ = 1, all clients have the domains in the proportions of the whole data.

    Test samples are split by the same rule, so each sample of the data is used once. Clients are tested on domains that
    they train on. With `leave_out`, all samples of one domain are the global test set, and statistics such as the mean
    of the images are computed without them.

    Args:
        clients_per_domain: Number of clients of each domain, or a mapping from each domain to its number. By default 1,
            or as `scenario.clients` says: one client for each domain, and each further client for the domain with most
            samples per client.
        mixing: λ, the share of samples that clients of all domains get equally, in [0, 1].
        leave_out: Name of the domain to test on; by default none.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(
        self,
        clients_per_domain: int | dict[str, int] | None = None,
        mixing: float = 0.0,
        leave_out: str | int | None = None,
    ) -> None:
        numbers = clients_per_domain.values() if isinstance(clients_per_domain, dict) else [clients_per_domain]
        for number in numbers:
            check_number("scenario.partition.clients_per_domain", number, "[1, inf)")
        check_number("scenario.partition.mixing", mixing, "[0, 1]")
        if isinstance(clients_per_domain, dict):  # YAML reads a key such as 15 as an integer
            clients_per_domain = {str(domain): number for domain, number in clients_per_domain.items()}
        self.clients_per_domain, self.mixing, self.leave_out = clients_per_domain, mixing, leave_out

    def split_dataset(
        self, data: LoadedData, labels: np.ndarray, clients: int | None, rng: np.random.Generator
    ) -> ClientSplits:
        """Split the dataset by the domains of its samples. `labels`, the classes, are not used.

        Raises:
            ConfigError: The samples have no domains, a domain that an option names does not exist, or `clients` is not
                the number of clients that the options give.
        """
        train, test = self._domains_of(data), data.client_test
        known, whole = np.unique(train), None
        if self.leave_out is not None:
            if test is None:
                what = "leave_out needs the domain of each test sample, and the dataset does not have it (client_test)"
                raise ConfigError(f"{self.error_prefix}: {what}. Add it, or leave leave_out out")
            left_out = self._rows_left_out(train)
            known = np.setdiff1d(known, train[left_out])
            whole = np.concatenate([left_out, len(train) + self._rows_left_out(test)])
        counts = self._clients_by_domain(known, train, clients)
        parts = self._split_domains(known, train, counts, rng)
        tests = None if test is None else self._split_domains(known, test, counts, rng)
        ids = [f"{domain}/{i}" for domain, count in zip(known, counts, strict=True) for i in range(count)]
        return ClientSplits(parts, tests if tests and any(map(len, tests)) else None, ids, whole)

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Split samples among clients by domain. `labels` is the domain of each sample, not its class."""
        known = np.unique(labels)
        return self._split_domains(known, labels, self._clients_by_domain(known, labels, clients), rng)

    def test_rows(self, data: LoadedData) -> np.ndarray:
        """Return the indices of the training samples of the domain that is left out."""
        return self._rows_left_out(self._domains_of(data))

    def _domains_of(self, data: LoadedData) -> np.ndarray:
        """Return the domain of each training sample."""
        if data.client_train is None:
            what = "the dataset has no domains (client_train)"
            raise ConfigError(f"{self.error_prefix}: {what}. Use a dataset with client ids, such as DomainFolder")
        if self.leave_out is not None:
            known = np.unique(data.client_train)
            if str(self.leave_out) not in map(str, known):
                what = f"{one_line(repr(self.leave_out))} not found"
                fix = f"Name one of the domains {one_line(join_names(known))}"
                raise ConfigError(f"scenario.partition.leave_out: {what}. {fix}")
            if len(known) == 1:
                raise ConfigError("scenario.partition.leave_out: the data have no other domain to train on. Remove it")
        return data.client_train

    def _rows_left_out(self, domains: np.ndarray) -> np.ndarray:
        """Return the ascending indices of the samples of the domain that is left out, given each sample's domain."""
        is_left_out = domains.astype(str) == str(self.leave_out)
        return np.flatnonzero(is_left_out) if self.leave_out is not None else np.arange(0)

    def _clients_by_domain(self, known: np.ndarray, domains: np.ndarray, clients: int | None) -> np.ndarray:
        """Return the number of clients of each domain in `known`, `(D,)`.

        Args:
            known: The domains.
            domains: The domain of each training sample.
            clients: Number of clients of all domains, if `scenario.clients` is set.
        """
        own, key = self.clients_per_domain, "scenario.partition.clients_per_domain"
        names = [str(domain) for domain in known]
        if own is None and clients is not None:
            return spread_clients(np.array([(domains == domain).sum() for domain in known]), clients)
        if isinstance(own, dict):
            if odd := sorted({*names} ^ own.keys()):
                fix = f"Give the number of clients of each of the domains {one_line(join_names(names))}"
                raise ConfigError(f"{key}: {one_line(repr(odd[0]))} is only in the option or only in the data. {fix}")
            counts = np.array([own[name] for name in names])
        else:
            counts = np.full(len(names), own or 1)
        if clients is not None and counts.sum() != clients:
            what = f"{clients}, but {key} gives {counts.sum()} clients in {len(names)} domains"
            raise ConfigError(f"scenario.clients: {what}. Leave one of them out")
        return counts

    def _split_domains(
        self, known: np.ndarray, domains: np.ndarray, clients: np.ndarray, rng: np.random.Generator
    ) -> list[np.ndarray]:
        """Split the samples of known domains among all clients; return each client's ascending indices.

        Args:
            known: The domains, ascending, `(D,)`. Samples of other domains are not used.
            domains: The domain of each sample.
            clients: Number of clients of each domain, `(D,)`.
            rng: The random generator.
        """
        rows = np.flatnonzero(np.isin(domains, known))
        if not len(rows):
            return [rows] * int(clients.sum())
        labels = np.searchsorted(known, domains[rows])
        sizes = np.bincount(labels, minlength=len(known))
        counts = mixed_counts(sizes, clients, self.mixing, rng)
        return [rows[part] for part in assign_samples(labels, counts[:, sizes > 0], rng)]


def mixed_counts(sizes: np.ndarray, clients: np.ndarray, mixing: float, rng: np.random.Generator) -> np.ndarray:
    """Return how many samples of each domain each client gets, `(K, D)`. Clients are ordered by their domain.

    Client k gets `λ n_d / K` samples of each domain d, and `(1 - λ) n_d / K_d` more of its own. Both are rounded so
    that the clients' numbers differ by at most one. Which clients get more is random.

    Args:
        sizes: Number of samples of each domain, `n_d`, `(D,)`.
        clients: Number of clients of each domain, `K_d`, `(D,)`.
        mixing: λ.
        rng: The random generator.

    Example:
        >>> mixed_counts(np.array([60, 20]), np.array([1, 1]), 0.5, np.random.default_rng(0))
        array([[45,  5],
               [15, 15]])
    """
    home = np.repeat(np.arange(len(sizes)), clients)
    counts = np.zeros((len(home), len(sizes)), dtype=np.int64)
    for domain, size in enumerate(sizes.tolist()):
        shared = round(mixing * size)
        for members, total in ((home >= 0, shared), (home == domain, size - shared)):
            parts = equal_sizes(total, int(members.sum()))
            counts[members, domain] += np.roll(parts, rng.integers(len(parts)))
    return counts


def spread_clients(sizes: np.ndarray, clients: int) -> np.ndarray:
    """Return the number of clients of each domain: one each, and the others where clients would have most samples.

    Args:
        sizes: Number of training samples of each domain, `(D,)`.
        clients: Number of clients of all domains.

    Raises:
        ConfigError: There are more domains than clients.

    Example:
        >>> spread_clients(np.array([100, 300, 90]), 5).tolist()
        [1, 3, 1]
    """
    if clients < len(sizes):
        what = f"{clients} clients for {len(sizes)} domains"
        raise ConfigError(f"scenario.clients: {what}. Each domain needs one: raise it, or leave it out")
    counts = np.ones(len(sizes), dtype=np.int64)
    for _ in range(clients - len(sizes)):
        counts[(sizes / counts).argmax()] += 1
    return counts


class DomainFolder(ImageFolder):
    """Images of several domains, as PACS, OfficeHome and DomainNet are laid out: `DOMAIN/CLASS/IMAGE`.

    The domain of an image is its client id, for the partitions `Domains` and `ByClient`. If there are lists
    `DOMAIN_train.txt` and `DOMAIN_test.txt` beside the folders, as in DomainNet, they name the training and the test
    images: a line is an image's path below `path`, and its class as a number, which is not read. Other files beside the
    folders are ignored. Otherwise images are read as in `ImageFolder`.

    Args:
        path: The folder of the domains.
        size: Height and width to resize all images to, or one number for both; not needed if all have one size.
        domains: The folders to read; by default all that contain folders.
        channels: 1 converts all images to grey, 3 to colour; by default grey if all of them are grey.
        test_share: Share of each domain's images to test on if there are no lists.
        cache: Folder for a file of the decoded images. They are memory-mapped instead of held in memory, and later
            runs reuse the file.
        mean: Mean of each channel, of pixels in [0, 1]; by default that of the training images.
        std: Standard deviation of each channel; by default that of the training images.
        augment: Random crop (4 pixels of padding) and horizontal flip of training batches: `none`, drawn
            `per_sample`, or drawn once `per_batch`.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(
        self,
        path: str,
        size: int | tuple[int, int] | None = None,
        domains: list[str] | None = None,
        channels: Literal[1, 3] | None = None,
        test_share: float = 0.2,
        cache: str | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        augment: Augment = "none",
    ) -> None:
        super().__init__(path, size, channels, test_share, cache, mean, std, augment)
        self.domains = domains

    def _samples(self) -> Samples:
        root = existing_path(self.path, folder=True)
        with naming_path():
            domains = self._domains(root)
            lists = self._lists(root, domains)
            if lists:
                parts = [[listed_images(root, path) for path in own] for own in lists]
                if both := set().union(*(set(train) & set(test) for train, test in parts)):
                    raise BadFile(min(both), "is in a list of training images and in one of test images")
            else:
                parts = [[_images_below(root / domain), []] for domain in domains]
        files = [path for train, test in parts for path in train + test]
        client = np.repeat(domains, [len(train) + len(test) for train, test in parts])
        test = np.concatenate([np.repeat([False, True], [len(train), len(test)]) for train, test in parts])
        return labelled_samples(files, [path.parent.name for path in files], client, test if lists else None, self)

    def _domains(self, root: Path) -> list[str]:
        """Return the names of the domains to read, each once, in alphabetical order."""
        found = [name for name in subfolders(root) if subfolders(root / name)]
        if missing := sorted(set(self.domains or ()) - set(found)):
            what = f"{one_line(self.path)} has no folder {one_line(missing[0])} with folders of classes in it"
            raise ConfigError(f"{KEY}.domains: {what}. It has {one_line(join_names(found)) or 'none'}")
        if not found:
            what = f"{one_line(self.path)}: no folder of a domain, with folders of classes in it, found"
            raise ConfigError(f"{KEY}.path: {what}. Lay the images out as DOMAIN/CLASS/IMAGE")
        return sorted(set(self.domains)) if self.domains else found

    def _lists(self, root: Path, domains: Sequence[str]) -> list[list[Path]]:
        """Return the lists of training and test images of each domain; none if there are no lists at all."""
        lists = [[root / f"{domain}_{split}.txt" for split in ("train", "test")] for domain in domains]
        missing = [path for own in lists for path in own if not check_exists(path)]
        if missing and len(missing) < 2 * len(lists):
            what = f"{one_line(str(missing[0]))}: not found, but other lists of images are there"
            raise ConfigError(f"{KEY}.path: {what}. Add it, or remove all lists")
        return [] if missing else lists


def listed_images(root: Path, path: Path) -> list[Path]:
    """Return the images that a list such as `clipart_train.txt` names, a line `DOMAIN/CLASS/IMAGE NUMBER` each.

    Raises:
        BadFile: A line does not begin with the path of an image below `root`.
    """
    images = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        name = re.sub(r"\s+\d+\s*\Z", "", line).strip()
        parts = name.split("/")
        if not name:
            continue
        if len(parts) != 3 or ".." in parts:
            raise BadFile(path, f"line {number} is {one_line(repr(line))}; it needs DOMAIN/CLASS/IMAGE and a number")
        images.append(root / name)
    return images


def _images_below(domain: Path) -> list[Path]:
    return [path for name in subfolders(domain) for path in files_in(domain / name)]
