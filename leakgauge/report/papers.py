"""The papers that methods cite."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reference:
    """A paper. `fields` are BibTeX fields beyond author, title and year, in order."""

    key: str
    kind: str
    author: str
    title: str
    year: int
    fields: tuple[tuple[str, str], ...]

    @property
    def link(self) -> str:
        known = dict(self.fields)
        return f"https://doi.org/{known['doi']}" if "doi" in known else known["url"]

    def bibtex(self) -> str:
        rows = [("author", self.author), ("title", self.title), ("year", str(self.year))]
        lines = [f"  {name} = {{{value}}}," for name, value in [*rows, *self.fields]]
        return "\n".join([f"@{self.kind}{{{self.key},", *lines, "}"])

    def line(self) -> str:
        """Authors: title. Venue, year."""
        names = [" ".join(reversed(n.split(", "))) for n in self.author.split(" and ")]
        known = dict(self.fields)
        venue = known.get("journal") or known.get("booktitle") or known["howpublished"]
        stop = "" if self.title.endswith("?") else "."
        text = f"{', '.join(names)}: {self.title}{stop} {venue}, {self.year}."
        return text.replace("{", "").replace("}", "").replace("--", "–")


PAPERS = [
    Reference(
        "phong2018",
        "article",
        "Phong, Le Trieu and Aono, Yoshinori and Hayashi, Takuya and Wang, Lihua and Moriai, Shiho",
        "Privacy-Preserving Deep Learning via Additively Homomorphic Encryption",
        2018,
        (
            ("journal", "IEEE Transactions on Information Forensics and Security"),
            ("volume", "13"),
            ("number", "5"),
            ("pages", "1333--1345"),
            ("doi", "10.1109/TIFS.2017.2787987"),
        ),
    ),
    Reference(
        "zhu2019",
        "inproceedings",
        "Zhu, Ligeng and Liu, Zhijian and Han, Song",
        "Deep Leakage from Gradients",
        2019,
        (
            ("booktitle", "Advances in Neural Information Processing Systems"),
            ("volume", "32"),
            ("url", "https://arxiv.org/abs/1906.08935"),
        ),
    ),
    Reference(
        "zhao2020",
        "misc",
        "Zhao, Bo and Mopuri, Konda Reddy and Bilen, Hakan",
        "{iDLG}: Improved Deep Leakage from Gradients",
        2020,
        (
            ("howpublished", "arXiv:2001.02610"),
            ("url", "https://arxiv.org/abs/2001.02610"),
        ),
    ),
    Reference(
        "geiping2020",
        "inproceedings",
        "Geiping, Jonas and Bauermeister, Hartmut and Dröge, Hannah and Moeller, Michael",
        "Inverting Gradients -- How Easy Is It to Break Privacy in Federated Learning?",
        2020,
        (
            ("booktitle", "Advances in Neural Information Processing Systems"),
            ("volume", "33"),
            ("pages", "16937--16947"),
            ("url", "https://arxiv.org/abs/2003.14053"),
        ),
    ),
    Reference(
        "yin2021",
        "inproceedings",
        "Yin, Hongxu and Mallya, Arun and Vahdat, Arash and Alvarez, Jose M. and Kautz, Jan "
        "and Molchanov, Pavlo",
        "See Through Gradients: Image Batch Recovery via {GradInversion}",
        2021,
        (
            ("booktitle", "IEEE/CVF Conference on Computer Vision and Pattern Recognition"),
            ("pages", "16332--16341"),
            ("doi", "10.1109/CVPR46437.2021.01607"),
        ),
    ),
    Reference(
        "fan2025",
        "inproceedings",
        "Fan, Mingyuan and Wang, Fuyi and Chen, Cen and Zhou, Jianying",
        "Boosting Gradient Leakage Attacks: Data Reconstruction in Realistic {FL} Settings",
        2025,
        (
            ("booktitle", "34th USENIX Security Symposium"),
            ("isbn", "978-1-939133-52-6"),
            ("url", "https://www.usenix.org/conference/usenixsecurity25/presentation/fan-boosting"),
        ),
    ),
    Reference(
        "zhu2025",
        "misc",
        "Zhu, Kaiming and Yang, Jinsheng and Guo, Siyang and Qin, Huaqian and Wang, Taiyu "
        "and Wang, Junbo and Nan, Yuhong and Zheng, Zibin",
        "Cracking Federated Privacy: Initialization-Resilient Gradient Inversion with "
        "Fine-Grained Reconstruction",
        2025,
        (
            ("howpublished", "Sun Yat-sen University; code on Zenodo"),
            ("doi", "10.5281/zenodo.17979356"),
        ),
    ),
    Reference(
        "dimitrov2022",
        "article",
        "Dimitrov, Dimitar I. and Balunović, Mislav and Konstantinov, Nikola and Vechev, Martin",
        "Data Leakage in Federated Averaging",
        2022,
        (
            ("journal", "Transactions on Machine Learning Research"),
            ("url", "https://openreview.net/forum?id=e7A0B99zJf"),
        ),
    ),
    Reference(
        "ma2023",
        "inproceedings",
        "Ma, Kailang and Sun, Yu and Cui, Jian and Li, Dawei and Guan, Zhenyu and Liu, Jianwei",
        "Instance-wise Batch Label Restoration via Gradients in Federated Learning",
        2023,
        (
            ("booktitle", "International Conference on Learning Representations"),
            ("url", "https://openreview.net/forum?id=FIrQfNSOoTr"),
        ),
    ),
    Reference(
        "balle2018",
        "inproceedings",
        "Balle, Borja and Wang, Yu-Xiang",
        "Improving the {Gaussian} Mechanism for Differential Privacy: Analytical Calibration and "
        "Optimal Denoising",
        2018,
        (
            ("booktitle", "35th International Conference on Machine Learning"),
            ("series", "Proceedings of Machine Learning Research"),
            ("volume", "80"),
            ("pages", "394--403"),
            ("url", "https://proceedings.mlr.press/v80/balle18a.html"),
        ),
    ),
    Reference(
        "lin2018",
        "inproceedings",
        "Lin, Yujun and Han, Song and Mao, Huizi and Wang, Yu and Dally, William J.",
        "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training",
        2018,
        (
            ("booktitle", "International Conference on Learning Representations"),
            ("url", "https://openreview.net/forum?id=SkhQHMW0W"),
        ),
    ),
    Reference(
        "wang2004",
        "article",
        "Wang, Zhou and Bovik, Alan C. and Sheikh, Hamid R. and Simoncelli, Eero P.",
        "Image Quality Assessment: From Error Visibility to Structural Similarity",
        2004,
        (
            ("journal", "IEEE Transactions on Image Processing"),
            ("volume", "13"),
            ("number", "4"),
            ("pages", "600--612"),
            ("doi", "10.1109/TIP.2003.819861"),
        ),
    ),
    Reference(
        "zhang2018",
        "inproceedings",
        "Zhang, Richard and Isola, Phillip and Efros, Alexei A. and Shechtman, Eli "
        "and Wang, Oliver",
        "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric",
        2018,
        (
            ("booktitle", "IEEE/CVF Conference on Computer Vision and Pattern Recognition"),
            ("pages", "586--595"),
            ("doi", "10.1109/CVPR.2018.00068"),
        ),
    ),
    Reference(
        "mcmahan2017",
        "inproceedings",
        "McMahan, Brendan and Moore, Eider and Ramage, Daniel and Hampson, Seth "
        "and {Agüera y Arcas}, Blaise",
        "Communication-Efficient Learning of Deep Networks from Decentralized Data",
        2017,
        (
            (
                "booktitle",
                "20th International Conference on Artificial Intelligence and Statistics",
            ),
            ("series", "Proceedings of Machine Learning Research"),
            ("volume", "54"),
            ("pages", "1273--1282"),
            ("url", "https://proceedings.mlr.press/v54/mcmahan17a.html"),
        ),
    ),
    Reference(
        "wang2020",
        "misc",
        "Wang, Yijue and Deng, Jieren and Guo, Dan and Wang, Chenghong and Meng, Xianrui "
        "and Liu, Hang and Ding, Caiwen and Rajasekaran, Sanguthevar",
        "{SAPAG}: A Self-Adaptive Privacy Attack From Gradients",
        2020,
        (
            ("howpublished", "arXiv:2009.06228"),
            ("url", "https://arxiv.org/abs/2009.06228"),
        ),
    ),
    Reference(
        "xu2022",
        "inproceedings",
        "Xu, Jin and Hong, Chi and Huang, Jiyue and Chen, Lydia Y. and Decouchant, Jérémie",
        "{AGIC}: Approximate Gradient Inversion Attack on Federated Learning",
        2022,
        (
            ("booktitle", "41st International Symposium on Reliable Distributed Systems"),
            ("pages", "12--22"),
            ("url", "https://arxiv.org/abs/2204.13784"),
        ),
    ),
    Reference(
        "ye2024",
        "inproceedings",
        "Ye, Zipeng and Luo, Wenjian and Zhou, Qi and Tang, Yubo",
        "High-Fidelity Gradient Inversion in Distributed Learning",
        2024,
        (
            ("booktitle", "38th AAAI Conference on Artificial Intelligence"),
            ("pages", "19983--19991"),
            ("doi", "10.1609/aaai.v38i18.29975"),
        ),
    ),
    Reference(
        "balunovic2022",
        "inproceedings",
        "Balunović, Mislav and Dimitrov, Dimitar I. and Staab, Robin and Vechev, Martin",
        "{Bayesian} Framework for Gradient Leakage",
        2022,
        (
            ("booktitle", "International Conference on Learning Representations"),
            ("url", "https://arxiv.org/abs/2111.04706"),
        ),
    ),
    Reference(
        "zhu2021",
        "inproceedings",
        "Zhu, Junyi and Blaschko, Matthew B.",
        "{R-GAP}: Recursive Gradient Attack on Privacy",
        2021,
        (
            ("booktitle", "International Conference on Learning Representations"),
            ("url", "https://arxiv.org/abs/2010.07733"),
        ),
    ),
    Reference(
        "dimitrov2024",
        "inproceedings",
        "Dimitrov, Dimitar I. and Baader, Maximilian and Müller, Mark Niklas and Vechev, Martin",
        "{SPEAR}: Exact Gradient Inversion of Batches in Federated Learning",
        2024,
        (
            ("booktitle", "Advances in Neural Information Processing Systems"),
            ("volume", "37"),
            ("url", "https://arxiv.org/abs/2403.03945"),
        ),
    ),
    Reference(
        "fowl2022",
        "inproceedings",
        "Fowl, Liam and Geiping, Jonas and Czaja, Wojciech and Goldblum, Micah and Goldstein, Tom",
        "Robbing the Fed: Directly Obtaining Private Data in Federated Learning with Modified "
        "Models",
        2022,
        (
            ("booktitle", "International Conference on Learning Representations"),
            ("url", "https://arxiv.org/abs/2110.13057"),
        ),
    ),
    Reference(
        "boenisch2023",
        "inproceedings",
        "Boenisch, Franziska and Dziedzic, Adam and Schuster, Roei and Shamsabadi, Ali Shahin and "
        "Shumailov, Ilia and Papernot, Nicolas",
        "When the Curious Abandon Honesty: Federated Learning Is Not Private",
        2023,
        (
            ("booktitle", "IEEE European Symposium on Security and Privacy"),
            ("url", "https://arxiv.org/abs/2112.02918"),
        ),
    ),
    Reference(
        "wen2022",
        "inproceedings",
        "Wen, Yuxin and Geiping, Jonas and Fowl, Liam and Goldblum, Micah and Goldstein, Tom",
        "Fishing for User Data in Large-Batch Federated Learning via Gradient Magnification",
        2022,
        (
            ("booktitle", "International Conference on Machine Learning"),
            ("url", "https://arxiv.org/abs/2202.00580"),
        ),
    ),
    Reference(
        "fowl2023",
        "inproceedings",
        "Fowl, Liam and Geiping, Jonas and Reich, Steven and Wen, Yuxin and Czaja, Wojciech and "
        "Goldblum, Micah and Goldstein, Tom",
        "Decepticons: Corrupted Transformers Breach Privacy in Federated Learning for Language "
        "Models",
        2023,
        (
            ("booktitle", "International Conference on Learning Representations"),
            ("url", "https://arxiv.org/abs/2201.12675"),
        ),
    ),
    Reference(
        "garov2024",
        "inproceedings",
        "Garov, Kostadin and Dimitrov, Dimitar I. and Jovanović, Nikola and Vechev, Martin",
        "Hiding in Plain Sight: Disguising Data Stealing Attacks in Federated Learning",
        2024,
        (
            ("booktitle", "International Conference on Learning Representations"),
            ("url", "https://arxiv.org/abs/2306.03013"),
        ),
    ),
    Reference(
        "zhao2024",
        "inproceedings",
        "Zhao, Joshua C. and Sharma, Atul and Elkordy, Ahmed Roushdy and Ezzeldin, Yahya H. and "
        "Avestimehr, Salman and Bagchi, Saurabh",
        "{LOKI}: Large-scale Data Reconstruction Attack against Federated Learning through Model "
        "Manipulation",
        2024,
        (
            ("booktitle", "IEEE Symposium on Security and Privacy"),
            ("url", "https://arxiv.org/abs/2303.12233"),
        ),
    ),
]
