// Sort and filter the table of all methods. Without JavaScript it is a plain table.
document.addEventListener("DOMContentLoaded", () => {
  const heading = document.getElementById("all-methods");
  const table = heading && heading.parentElement.querySelector("#all-methods ~ table, #all-methods ~ * table");
  if (!table) return;
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const headers = [...table.tHead.rows[0].cells];
  const text = (row, column) => row.cells[column].textContent.trim();

  // A field for words, and a menu for each column with few different values.
  const controls = document.createElement("form");
  controls.className = "table-filter";
  controls.addEventListener("submit", (event) => event.preventDefault());
  const words = document.createElement("input");
  words.type = "search";
  words.placeholder = "Filter by words";
  words.setAttribute("aria-label", "Filter by words");
  controls.append(words);
  const menus = new Map();
  headers.forEach((header, column) => {
    const values = [...new Set(rows.map((row) => text(row, column)))];
    if (values.length > 6) return;
    const menu = document.createElement("select");
    menu.setAttribute("aria-label", header.textContent);
    menu.add(new Option(`${header.textContent}: any`, ""));
    values.forEach((value) => menu.add(new Option(value || `no ${header.textContent}`, `=${value}`)));
    menus.set(column, menu);
    controls.append(menu);
  });
  const count = document.createElement("output");
  controls.append(count);
  heading.after(controls);

  function filter() {
    const sought = words.value.toLowerCase().split(/\s+/);
    rows.forEach((row) => {
      const content = row.textContent.toLowerCase();
      const chosen = [...menus].every(([column, menu]) => !menu.value || menu.value === `=${text(row, column)}`);
      row.hidden = !(chosen && sought.every((word) => content.includes(word)));
    });
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
  }

  function sort(column) {
    const descending = headers[column].getAttribute("aria-sort") === "ascending";
    headers.forEach((header) => header.removeAttribute("aria-sort"));
    headers[column].setAttribute("aria-sort", descending ? "descending" : "ascending");
    const compare = (a, b) => text(a, column).localeCompare(text(b, column), "en", { numeric: true });
    body.append(...rows.sort((a, b) => (descending ? compare(b, a) : compare(a, b))));
  }

  headers.forEach((header, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    button.addEventListener("click", () => sort(column));
    header.append(button);
  });
  controls.addEventListener("input", filter);
  filter();
});
