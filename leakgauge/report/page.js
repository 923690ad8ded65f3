(() => {
  // A link to a section opens it; paper shows every section.
  const folds = () => Array.from(document.querySelectorAll("details"));
  const unfold = () => {
    const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    const fold = target && target.querySelector("details.fold");
    if (!fold) return;
    fold.open = true;
    target.scrollIntoView();
  };
  window.addEventListener("hashchange", unfold);
  document.addEventListener("click", (event) => {
    // The address does not change when the same link is followed again.
    const link = event.target.closest('nav a[href^="#"]');
    if (link && link.hash === location.hash) unfold();
  });
  unfold();
  let closed = [];
  window.addEventListener("beforeprint", () => {
    closed = folds().filter((fold) => !fold.open);
    for (const fold of closed) fold.open = true;
  });
  window.addEventListener("afterprint", () => {
    for (const fold of closed) fold.open = false;
  });

  // Each card carries its place in every order; sorting is putting the cards in that order.
  const gallery = document.getElementById("gallery");
  const bar = document.getElementById("orders");
  if (!gallery || !bar) return;
  bar.hidden = false;
  bar.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const order = button.dataset.order;
    const cards = Array.from(gallery.children);
    cards.sort((a, b) => a.dataset[order] - b.dataset[order]);
    gallery.append(...cards);
    for (const other of bar.querySelectorAll("button")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
  });
})();
