"""German sentences put together from a small grammar, for translation prompts."""

from __future__ import annotations

import random

_SUBJECTS = (
    "Die Regierung|Der Präsident|Die Polizei|Das Unternehmen|Der Bürgermeister|Die Universität|Ein Sprecher des Ministeriums|"
    "Die Europäische Union|Der Verein|Die Opposition|Das Gericht|Der Hersteller|Die Feuerwehr|Eine junge Ärztin|Mein Bruder|"
    "Unser Nachbar|Die Lehrerin|Der Trainer|Ein Forscher aus Wien|Die Bank|Die Stadtverwaltung|Das Museum|Der Verband|"
    "Die Gewerkschaft|Der Minister|Die Bundeskanzlerin|Ein Augenzeuge|Das Krankenhaus|Die Fluggesellschaft|Der Autor|"
    "Die Besucher|Viele Eltern|Die Schüler|Einige Experten|Die Anwohner|Tausende Menschen|Die Kunden|Die Spieler"
).split("|")
_PLURAL_FROM = 30  # subjects from here on take the plural verb
_VERBS = (
    "hat/haben;vorgestellt|hat/haben;kritisiert|hat/haben;abgelehnt|hat/haben;angekündigt|will/wollen;verbessern|"
    "kann/können;nicht verstehen|hat/haben;verloren|muss/müssen;bezahlen|hat/haben;gefordert|wird/werden;verkaufen|"
    "hat/haben;untersucht|soll/sollen;schützen|hat/haben;unterstützt|möchte/möchten;besuchen|hat/haben;gefunden|"
    "darf/dürfen;nicht vergessen|hat/haben;beschlossen|wird/werden;prüfen|hat/haben;übernommen|konnte/konnten;retten"
).split("|")
_OBJECTS = (
    "das neue Gesetz|die alte Brücke|einen wichtigen Vertrag|die Ergebnisse der Studie|den Vorschlag|die hohen Preise|"
    "ein großes Projekt|das kleine Dorf|die Arbeitsplätze|den Bericht|die historische Altstadt|das Spiel|mehrere Fahrzeuge|"
    "eine bessere Lösung|die Pläne für den Flughafen|das Angebot|die Zukunft der Stadt|den Kampf gegen den Klimawandel|"
    "die Sicherheit im Straßenverkehr|ein Buch über die Geschichte Europas|die Zusammenarbeit mit den Nachbarländern|"
    "die Kosten der Renovierung|den Haushalt|ein seltenes Gemälde|die Qualität des Wassers|neue Arbeitsmodelle"
).split("|")
_TIMES = (
    "am Montag|gestern Abend|im vergangenen Jahr|vor zwei Wochen|in den letzten Monaten|am Donnerstagmorgen|seit langer Zeit|"
    "im Sommer|nach dem Unfall|kurz vor Weihnachten|während der Sitzung|trotz der Kritik|wegen des schlechten Wetters|"
    "zum ersten Mal|nach Angaben der Zeitung|im Jahr {year}|noch in diesem Herbst|ohne zu zögern|bis Ende {year}"
).split("|")
_PLACES = (
    "in Berlin|in der Nähe von Hamburg|in München|an der Küste|im Süden des Landes|in der Schweiz|in Köln|auf dem Land|"
    "in ganz Europa|in Frankfurt|im Parlament|vor dem Rathaus|in Leipzig|in einem kleinen Dorf|in Österreich|im Stadion"
).split("|")
_TAILS = (
    ", weil es keine andere Möglichkeit gab|, obwohl viele Bürger dagegen waren|, um Geld zu sparen|"
    ", sagte ein Sprecher|, berichtete eine Zeitung|, und die Reaktionen waren sehr unterschiedlich|"
    ", aber das Ergebnis bleibt offen|, damit die Kinder sicher zur Schule gehen können|, heißt es in dem Bericht|"
    ", was viele überrascht hat|, ohne die Einzelheiten zu nennen|, nachdem die Verhandlungen gescheitert waren|||||||"
).split("|")
_LEADS = (
    "Es ist wichtig, dass wir mehr über {topic} wissen.|Warum ist {topic} heute so bedeutend?|Über {topic} wird viel diskutiert.|"
    "Ich interessiere mich seit meiner Kindheit für {topic}.|Niemand weiß genau, wie sich {topic} entwickeln wird.|"
    "Die Zahl der Menschen, die sich mit {topic} beschäftigen, steigt jedes Jahr.|Können Sie mir bitte etwas über {topic} sagen?|"
    "Früher war {topic} nur wenigen bekannt.|Rund {num} Prozent der Befragten halten {topic} für ein großes Thema."
).split("|")
_TOPICS = (
    "Energie|Musik|künstliche Intelligenz|Gesundheit|Fußball|Landwirtschaft|moderne Kunst|Tourismus|das Internet|Bildung|"
    "Raumfahrt|das Wetter|gesunde Ernährung|Medizin|Architektur|Umweltschutz|Wirtschaft|Verkehr|Literatur|Demokratie"
).split("|")


def german_sentence(rng: random.Random) -> str:
    """One sentence, newspaper or everyday style; its grammar is right, its sense is a matter of luck."""
    year, num = rng.randint(1950, 2030), rng.randint(5, 95)
    if rng.random() < 0.3:
        return rng.choice(_LEADS).format(topic=rng.choice(_TOPICS), num=num)
    index = rng.randrange(len(_SUBJECTS))
    forms, participle = rng.choice(_VERBS).split(";")
    verb = forms.split("/")[index >= _PLURAL_FROM]
    subject, time = _SUBJECTS[index], rng.choice(_TIMES).format(year=year)
    middle = [rng.choice(_OBJECTS), participle]
    if rng.random() < 0.5:
        middle.insert(0, rng.choice(_PLACES))
    if rng.random() < 0.4:
        start = [time[0].upper() + time[1:], verb, subject[0].lower() + subject[1:]]
    else:
        start = [subject, verb, time]
    return " ".join(start + middle) + rng.choice(_TAILS) + "."
